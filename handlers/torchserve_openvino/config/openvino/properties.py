"""The option ``config``: OpenVINO properties, checked by name and value before any model is compiled."""

import re
from collections.abc import Mapping
from typing import Any

from torchserve_openvino.config.openvino.devices import DeviceCatalog, DeviceSpec, family
from torchserve_openvino.config.problems import KeyPath, Problems
from torchserve_openvino.config.spelling import listed, nearest, parse_bool, shown

PRECISION = "INFERENCE_PRECISION_HINT"
EXECUTION_MODE = "EXECUTION_MODE_HINT"
DEVICE_PROPERTIES = "DEVICE_PROPERTIES"
HINT = "PERFORMANCE_HINT"
REQUESTS = "PERFORMANCE_HINT_NUM_REQUESTS"
STREAMS = "NUM_STREAMS"
THREADS = "INFERENCE_NUM_THREADS"
KERNELS = "CPU_RUNTIME_CACHE_CAPACITY"

_WORDS: dict[str, tuple[str, ...]] = {
    HINT: ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT"),
    EXECUTION_MODE: ("PERFORMANCE", "ACCURACY"),
    PRECISION: ("f32", "f16", "bf16", "dynamic", "i8"),
    "SCHEDULING_CORE_TYPE": ("ANY_CORE", "PCORE_ONLY", "ECORE_ONLY"),
    "CACHE_MODE": ("OPTIMIZE_SIZE", "OPTIMIZE_SPEED"),
    "MODEL_PRIORITY": ("LOW", "MEDIUM", "HIGH"),
}
# OpenVINO takes "f32" and "FP32", but not the names of PyTorch and NumPy.
_PRECISION_ALIASES = {
    "fp32": "f32",
    "float32": "f32",
    "float": "f32",
    "fp16": "f16",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "undefined": "dynamic",
    "int8": "i8",
}
_INTEGERS = frozenset({"AUTO_BATCH_TIMEOUT", THREADS, REQUESTS, "COMPILATION_NUM_THREADS", KERNELS})
# AUTO passes the second on to its members as the first (measured on 2026.4).
_SPLITTING = frozenset({"THROUGHPUT", "CUMULATIVE_THROUGHPUT"})
# OpenVINO's constants for a number of streams that it chooses itself.
_STREAM_WORDS = {-1: "AUTO", -2: "NUMA"}
_BOOLEANS = frozenset(
    {
        "ALLOW_AUTO_BATCHING",
        "CPU_DENORMALS_OPTIMIZATION",
        "ENABLE_CPU_PINNING",
        "ENABLE_CPU_RESERVATION",
        "ENABLE_HYPER_THREADING",
        "ENABLE_MMAP",
        "FORCE_TBB_TERMINATE",
        "PERF_COUNT",
    }
)


def names_of(device: str, catalog: DeviceCatalog) -> dict[str, str]:
    """Returns the properties of one device with their access modes; the documented ones if it can't be queried."""
    listed_names = catalog.properties(device)
    if listed_names is None:
        return known_properties(family(device))
    return dict(listed_names) | dict.fromkeys(UNLISTED.get(family(device), ()), "RW")


def check_properties(
    config: Mapping[Any, Any], spec: DeviceSpec, catalog: DeviceCatalog, problems: Problems
) -> dict[str, Any]:
    """Checks the properties given for a device.

    Args:
        config: As the user wrote it; not modified.
        spec: The device. AUTO, HETERO and MULTI accept their own properties and those of their members, which
            they pass on (measured on 2026.4: ``INFERENCE_PRECISION_HINT`` reaches the members). They silently
            drop unknown names, which is why those are refused here.
        catalog: Devices and properties to check against.
        problems: Collects what is wrong; its prefix is that of ``config``.

    Returns:
        The properties, with values as ``compile_model`` accepts them.
    """
    before = len(problems)
    checked = _check_each(config, spec, catalog, problems)
    # Contradictions are only looked for between values that are valid by themselves.
    if len(problems) == before:
        _check_together(config, checked, spec, problems)
    return checked


def _check_each(
    config: Mapping[Any, Any], spec: DeviceSpec, catalog: DeviceCatalog, problems: Problems
) -> dict[str, Any]:
    hardware = spec.hardware(catalog)
    devices = (*((spec.virtual,) if spec.virtual else ()), *hardware)
    tables = {device: names_of(device, catalog) for device in devices}
    # Devices that can't be queried have more properties than the documented ones.
    prefixes = tuple(f"{family(device)}_" for device in devices if catalog.properties(device) is None)
    checked: dict[str, Any] = {}
    for name, value in config.items():
        if name == DEVICE_PROPERTIES:
            checked[name] = _check_nested(value, spec, catalog, problems)
            continue
        if not _name_is_valid(name, tables, prefixes, problems, spec.name):
            continue
        ok, canonical = canonical_value(str(name), value, problems, (str(name),))
        if not ok:
            continue
        checked[str(name)] = canonical
        for device, table in tables.items():
            if name not in table or catalog.properties(device) is None:
                continue
            if refusal := catalog.refusal(device, str(name), canonical):
                problems.add((str(name),), f"{device} refuses {shown(value)}: {refusal}")
                break
        else:
            _check_not_negative(str(name), canonical, problems)
    return checked


def _check_nested(
    value: Any, spec: DeviceSpec, catalog: DeviceCatalog, problems: Problems
) -> dict[str, dict[str, Any]]:
    problems = problems.at(DEVICE_PROPERTIES)
    if not isinstance(value, Mapping):
        problems.add((), f"must map device names to properties, e.g. {{CPU: {{NUM_STREAMS: 2}}}}, not {shown(value)}.")
        return {}
    hardware = spec.hardware(catalog)
    checked: dict[str, dict[str, Any]] = {}
    for device, properties in value.items():
        name = str(device).upper()
        if not any(name == member or member.startswith(f"{name}.") for member in hardware):
            hint = nearest(name, hardware)
            problems.add((str(device),), f"is not among the devices of {spec.name}.", suggestion=hint)
        elif not isinstance(properties, Mapping):
            problems.add((str(device),), f"must be a mapping of properties, not {shown(properties)}.")
        elif name in checked:
            problems.add((str(device),), f"is {name}, which is there already: join the two.")
        else:
            checked[name] = _check_each(
                properties, DeviceSpec(name, members=(name,)), catalog, problems.at(str(device))
            )
    return checked


def _check_not_negative(name: str, value: Any, problems: Problems) -> None:
    """Refuses negative numbers: devices that can't be queried do not check them, and for streams they are cryptic."""
    if name in {STREAMS, THREADS, KERNELS} and isinstance(value, int) and value < 0:
        hint = _STREAM_WORDS.get(value) if name == STREAMS else None
        problems.add((name,), f"must not be negative, but is {value}.", suggestion=hint)


def _check_together(
    config: Mapping[Any, Any], checked: Mapping[str, Any], spec: DeviceSpec, problems: Problems
) -> None:
    """Reports properties that contradict each other; a member's own ones override those of the whole device."""
    members = checked.get(DEVICE_PROPERTIES, {})
    # Keyed by the user's spelling, so that a problem is reported at its line.
    nested = {str(device): members[str(device).upper()] for device in config.get(DEVICE_PROPERTIES, ())}
    hints = [checked.get(HINT), *(own.get(HINT) for own in nested.values())]
    # Without a hint, MULTI (and no other device) passes THROUGHPUT to its members (measured on 2026.4).
    unstated_is_fine = spec.virtual == "MULTI" and hints == [None]
    if REQUESTS in checked and not (_SPLITTING & set(hints) or unstated_is_fine):
        problems.add((REQUESTS,), _no_throughput(checked[REQUESTS], checked.get(HINT)))
    _check_streams((), checked, checked, problems, has_threads=True)
    for device, own in nested.items():
        keys, whole = (DEVICE_PROPERTIES, device), {**checked, **own}
        if REQUESTS in own and whole.get(HINT) not in _SPLITTING:
            problems.add((*keys, REQUESTS), _no_throughput(own[REQUESTS], whole.get(HINT)))
        # A number of threads that is set for the whole device applies to the CPU.
        _check_streams(keys, own, whole, problems, has_threads=THREADS in own or family(device.upper()) == "CPU")


def _no_throughput(requests: Any, hint: str | None) -> str:
    stated = f"is {requests}, but {HINT} is {hint or 'not stated'}, and it only has an effect with THROUGHPUT."
    return f"{stated} Set {HINT}: THROUGHPUT, or remove {REQUESTS}."


def _check_streams(
    keys: KeyPath, own: Mapping[str, Any], whole: Mapping[str, Any], problems: Problems, *, has_threads: bool
) -> None:
    """Checks the streams against the hint and the threads; `own` are the properties written at `keys`."""
    streams, threads = whole.get(STREAMS), whole.get(THREADS)
    if not isinstance(streams, int):
        return
    if streams > 1 and whole.get(HINT) == "LATENCY" and {STREAMS, HINT} & set(own):
        problems.add(
            (*keys, STREAMS if STREAMS in own else HINT),
            f"{STREAMS}: {streams} contradicts {HINT}: LATENCY, which gives one request all threads. Remove {STREAMS} "
            f"for the shortest answer time; for parallel streams set {HINT}: THROUGHPUT.",
        )
    # With 0 threads OpenVINO chooses the number. It silently reduces the streams to the number of threads.
    if has_threads and threads and streams > threads and {STREAMS, THREADS} & set(own):
        problems.add(
            (*keys, STREAMS if STREAMS in own else THREADS),
            f"{STREAMS}: {streams} is more than {THREADS}: {threads}, and a stream needs at least one thread. "
            f"Set {STREAMS} to at most {threads}, or {THREADS} to at least {streams}.",
        )


def _name_is_valid(
    name: Any, tables: Mapping[str, Mapping[str, str]], prefixes: tuple[str, ...], problems: Problems, target: str
) -> bool:
    access = {table[name] for table in tables.values() if name in table}
    if access - {"RO"} or name in CORE or (isinstance(name, str) and name.startswith(prefixes)):
        return True
    if access:
        problems.add((str(name),), f"is read-only on {target}; it cannot be set.")
        return False
    settable = {name for table in tables.values() for name, mode in table.items() if mode != "RO"} | CORE
    hint = nearest(str(name), settable)
    problems.add((str(name),), f"is not an OpenVINO property of {target}.", suggestion=hint)
    return False


def canonical_value(name: str, value: Any, problems: Problems, keys: KeyPath) -> tuple[bool, Any]:
    """Converts one value to the form that ``compile_model`` accepts.

    Args:
        name: The property.
        value: str, int, bool or float from YAML, or one of openvino's own enumeration values.
        problems: Collects what is wrong.
        keys: Path of the property.

    Returns:
        Whether the value is usable, and the value.
    """
    if name == "CACHE_ENCRYPTION_CALLBACKS":
        return True, value
    if not isinstance(value, (str, bool, int, float)):
        value = _enumeration_name(value)
    if not isinstance(value, (str, bool, int, float)):
        problems.add(keys, f"must be a string, a number or a boolean, not {shown(value)}.")
        return False, None
    if name in _WORDS:
        return _word(name, value, problems, keys)
    if name in _BOOLEANS:
        flag = parse_bool(value)
        if flag is None:
            problems.add(keys, f"must be true or false, not {shown(value)}.")
        return flag is not None, flag
    if name == STREAMS and str(value).strip().upper() in _STREAM_WORDS.values():
        return True, str(value).strip().upper()
    if name in _INTEGERS or name == STREAMS:
        if not re.fullmatch(r"-?[0-9]{1,300}(\.0)?", str(value)):
            problems.add(keys, f"must be an integer, not {shown(value)}.")
            return False, None
        return True, int(float(value))
    return True, value


def _enumeration_name(value: Any) -> Any:
    type_name = getattr(value, "get_type_name", None)
    return type_name() if callable(type_name) else getattr(value, "name", value)


def _word(name: str, value: Any, problems: Problems, keys: KeyPath) -> tuple[bool, Any]:
    allowed = _WORDS[name]
    text = str(value).strip()
    if name == PRECISION:
        lower = text.lower().removeprefix("torch.")
        text = _PRECISION_ALIASES.get(lower, lower)
    else:
        text = text.upper()
    if text in allowed:
        return True, text
    problems.add(keys, f"must be one of {listed(allowed)}, not {shown(value)}.", suggestion=nearest(text, allowed))
    return False, None


def with_default_precision(config: Mapping[str, Any], spec: DeviceSpec) -> tuple[dict[str, Any], str | None]:
    """Adds ``INFERENCE_PRECISION_HINT: f32`` where the user set neither precision nor execution mode.

    By default, OpenVINO uses bf16 on CPUs that support it and f16 on GPUs; here the precision is always explicit.
    AUTO, HETERO and MULTI pass it on. The NPU computes in f16 only and refuses f32, so where one is a member, each
    other member gets the hint through ``DEVICE_PROPERTIES``.

    Returns:
        A new dict, and the name of the property that was added (None if nothing was).
    """
    result = dict(config)
    stated = {PRECISION, EXECUTION_MODE}
    if stated & set(result):
        return result, None
    nested = {device: dict(values) for device, values in (result.get(DEVICE_PROPERTIES) or {}).items()}
    members = spec.members or ("",)
    plain = [member for member in members if family(member) != "NPU"]
    if not plain:
        return result, None
    if len(plain) == len(members) and not any(stated & set(values) for values in nested.values()):
        result[PRECISION] = "f32"
        return result, PRECISION
    added = False
    for member in plain:
        own = nested.get(member) or nested.get(family(member)) or {}
        if member and not stated & set(own):
            nested.setdefault(member, {})[PRECISION] = "f32"
            added = True
    if added:
        result[DEVICE_PROPERTIES] = nested
    return result, DEVICE_PROPERTIES if added else None


# --- OpenVINO properties by name, for devices that can't be queried because this machine lacks them ---------------
# Source: OpenVINO 2026.4's headers (openvino/runtime/properties.hpp, intel_gpu, intel_npu and auto) and its
# supported properties pages. Only those that compile_model accepts. A name with the prefix of its device
# (``NPU_``, ``GPU_``) is accepted without being listed, since every release adds more.


# Accepted by Core.compile_model itself, for every device.
CORE = frozenset(
    {
        "ALLOW_AUTO_BATCHING",
        "AUTO_BATCH_TIMEOUT",
        "CACHE_DIR",
        "CACHE_ENCRYPTION_CALLBACKS",
        "CACHE_MODE",
        "DEVICE_PROPERTIES",
        "ENABLE_MMAP",
        "FORCE_TBB_TERMINATE",
    }
)

_COMMON = frozenset(
    {
        "DEVICE_ID",
        "ENABLE_CPU_PINNING",
        "EXECUTION_MODE_HINT",
        "INFERENCE_PRECISION_HINT",
        "LOG_LEVEL",
        "NUM_STREAMS",
        "PERFORMANCE_HINT",
        "PERFORMANCE_HINT_NUM_REQUESTS",
        "PERF_COUNT",
        "WEIGHTS_PATH",
    }
)

_MULTIPLE = frozenset(
    {
        "DEVICE_BIND_BUFFER",
        "EXECUTION_MODE_HINT",
        "LOG_LEVEL",
        "MODEL_PRIORITY",
        "MULTI_DEVICE_PRIORITIES",
        "PERFORMANCE_HINT",
        "PERFORMANCE_HINT_NUM_REQUESTS",
        "PERF_COUNT",
        "SCHEDULE_POLICY",
    }
)

# Accepted by the plugins, but not in their SUPPORTED_PROPERTIES (checked in tests/contract).
UNLISTED: dict[str, frozenset[str]] = {"CPU": frozenset({"CPU_RUNTIME_CACHE_CAPACITY"})}

BY_FAMILY: dict[str, frozenset[str]] = {
    "CPU": _COMMON
    | UNLISTED["CPU"]
    | {
        "CPU_DENORMALS_OPTIMIZATION",
        "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE",
        "ENABLE_CPU_RESERVATION",
        "ENABLE_HYPER_THREADING",
        "ENABLE_TENSOR_PARALLEL",
        "ENABLE_WEIGHTLESS",
        "INFERENCE_NUM_THREADS",
        "KEY_CACHE_GROUP_SIZE",
        "KEY_CACHE_PRECISION",
        "KV_CACHE_PRECISION",
        "MODEL_DISTRIBUTION_POLICY",
        "SCHEDULING_CORE_TYPE",
        "TBB_PARTITIONER",
        "VALUE_CACHE_GROUP_SIZE",
        "VALUE_CACHE_PRECISION",
    },
    "GPU": _COMMON
    | {
        "ACTIVATIONS_SCALE_FACTOR",
        "COMPILATION_NUM_THREADS",
        "CONFIG_FILE",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE",
        "ENABLE_CPU_RESERVATION",
        "KV_CACHE_PRECISION",
        "MODEL_PRIORITY",
    },
    "NPU": _COMMON
    | {
        "COMPILATION_NUM_THREADS",
        "ENABLE_WEIGHTLESS",
        "INFERENCE_NUM_THREADS",
        "MODEL_PRIORITY",
        "WORKLOAD_TYPE",
    },
    "AUTO": _MULTIPLE
    | {
        "DEVICES_UTILIZATION_THRESHOLD",
        "ENABLE_RUNTIME_FALLBACK",
        "ENABLE_STARTUP_FALLBACK",
        "LOW_POWER_DEVICE",
    },
    "MULTI": _MULTIPLE,
    "HETERO": frozenset({"MODEL_DISTRIBUTION_POLICY", "MULTI_DEVICE_PRIORITIES"}),
}


def known_properties(family: str) -> dict[str, str]:
    """Returns the documented properties of a device family, in the form of ``SUPPORTED_PROPERTIES``."""
    return dict.fromkeys(BY_FAMILY.get(family, _COMMON), "RW")
