"""OpenVINO properties by name, for devices that can't be queried because this machine lacks them.

Source: OpenVINO 2026.4's headers (openvino/runtime/properties.hpp, intel_gpu, intel_npu and auto) and its
supported properties pages. Only those that compile_model accepts. A name with the prefix of its device
(``NPU_``, ``GPU_``) is accepted without being listed, since every release adds more.
"""

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
