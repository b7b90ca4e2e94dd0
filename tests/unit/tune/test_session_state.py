"""What an interrupted run of the tuner leaves, and what the next one reads."""

from pathlib import Path

from torchserve_openvino.tune.candidates import ComputeSettings
from torchserve_openvino.tune.offered_options import Option
from torchserve_openvino.tune.profile import Profile
from torchserve_openvino.tune.session import State

FOLD = Option(("handler", "openvino", "image", "fold"), "true")
PROFILE = Profile(
    {ComputeSettings("f32", 2): {1: 3.5, 8: 20.0}, ComputeSettings("f32", 2, 1, (FOLD,)): {1: 3.0, 8: 18.0}},
    {ComputeSettings("bf16", 1, 2): "wrong answer to a.jpg"},
    options={str(FOLD): "1.17 (1.1 to 1.2) times as fast"},
)


def test_a_later_run_reads_what_an_earlier_one_measured(tmp_path: Path) -> None:
    path = tmp_path / "net-tuned" / "trials.json"
    state = State(path, "a")
    assert state.profile is None and state.trial("x#1") is None
    state.keep_profile(PROFILE)
    state.keep_trial("x#1", {"rejected": "slow"})
    again = State(path, "a")
    assert again.profile == PROFILE
    assert again.trial("x#1") == {"rejected": "slow"} and again.trial("x#2") is None


def test_other_settings_or_a_damaged_file_start_anew(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    State(path, "a").keep_trial("x#1", {"rejected": "slow"})
    assert State(path, "b").trial("x#1") is None
    path.write_text("{")
    assert State(path, "a").trial("x#1") is None
