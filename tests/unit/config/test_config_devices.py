import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchserve_openvino.config import resolve_options
from torchserve_openvino.config.openvino.devices import parse_device
from torchserve_openvino.config.problems import Problems
from torchserve_openvino.errors import ConfigError, DeviceNotFoundError


def device_of(value, catalog=None, **kwargs):
    return resolve_options({"device": value}, env={}, catalog=catalog, **kwargs).options.device


@pytest.mark.parametrize(
    ("given_name", "canonical"),
    [
        ("CPU", "CPU"),
        ("cpu", "CPU"),
        ("gpu", "GPU"),
        ("Gpu.0", "GPU.0"),
        ("npu", "NPU"),
        ("auto", "AUTO"),
        ("AUTO: gpu, cpu", "AUTO:GPU,CPU"),
        ("auto:-gpu", "AUTO:-GPU"),
        ("hetero:GPU.1,cpu", "HETERO:GPU.1,CPU"),
        ("multi:gpu(4),cpu(2)", "MULTI:GPU(4),CPU(2)"),
    ],
)
def test_every_form_is_brought_to_openvinos_spelling(given_name, canonical, many_devices):
    assert device_of(given_name, many_devices) == canonical


@pytest.mark.parametrize("name", ["CPU", "cpu", "AUTO", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU"])
def test_devices_of_this_machine(name):
    assert device_of(name) == name.upper()


@pytest.mark.parametrize("name", ["GPU.7", "AUTO:GPU.7,CPU", "HETERO:TPU,CPU", "CPU.0", "NVIDIA"])
def test_an_absent_device_is_named_with_those_that_are_there(name, many_devices):
    with pytest.raises(DeviceNotFoundError, match=r"available: CPU, GPU\.0, GPU\.1, NPU"):
        device_of(name, many_devices)


def test_an_absent_gpu_on_this_machine():
    with pytest.raises(DeviceNotFoundError, match="no device 'GPU'.*available: CPU"):
        resolve_options({"device": "GPU", "precision": "f16"}, env={})
    with pytest.raises(DeviceNotFoundError, match="no device 'GPU'.*available: CPU") as caught:
        device_of("gpu")
    assert (caught.value.key, caught.value.location, caught.value.suggestion) == ("device", "options", "CPU")


def test_a_lone_gpu_answers_to_its_number(one_gpu):
    assert device_of("GPU.0", one_gpu) == "GPU.0"
    with pytest.raises(DeviceNotFoundError):
        device_of("GPU.1", one_gpu)


def test_auto_that_leaves_nothing():
    with pytest.raises(DeviceNotFoundError, match="leaves no device"):
        device_of("AUTO:-CPU")


@pytest.mark.parametrize(
    "name", ["", "  ", 3, "CPU,GPU", "CPU:GPU", "HETERO", "MULTI", "AUTO:", "AUTO:AUTO", "HETERO:-GPU,CPU"]
)
def test_what_is_no_device_name(name, many_devices):
    with pytest.raises(ConfigError) as caught:
        device_of(name, many_devices)
    assert caught.value.key == "device"


def test_without_a_device_check_only_the_family_counts():
    assert device_of("GPU.3", check_device=False) == "GPU.3"
    with pytest.raises(DeviceNotFoundError) as caught:
        device_of("GPV", check_device=False)
    assert caught.value.suggestion == "GPU"


@given(
    st.lists(st.sampled_from(["CPU", "GPU", "GPU.0", "NPU"]), min_size=1, max_size=4, unique=True),
    st.sampled_from(["AUTO", "HETERO", "MULTI"]),
    st.data(),
)
def test_case_and_blanks_do_not_matter(members, head, data):
    canonical = f"{head}:{','.join(members)}"
    spelled = "".join(
        data.draw(st.sampled_from([letter, letter.lower()])) + data.draw(st.sampled_from(["", " "]))
        for letter in canonical
    )
    problems = Problems(lambda _: "")
    spec = parse_device(spelled, problems)
    assert spec is not None
    assert not len(problems)
    assert (spec.name, spec.virtual, spec.members) == (canonical, head, tuple(members))
