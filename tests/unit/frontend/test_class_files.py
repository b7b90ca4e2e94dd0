"""Java class files are read and written again, and changed where they are to be."""

import struct
import zipfile

import pytest

from torchserve_openvino.frontend import Frontend
from torchserve_openvino.frontend.class_file import Caught, ClassFile, Code
from torchserve_openvino.frontend.patches import CLASSES


@pytest.fixture(scope="module")
def classes() -> dict[str, bytes]:
    with zipfile.ZipFile(Frontend.installed().path) as archive:
        names = [name for name in archive.namelist() if name.startswith("org/pytorch/serve/wlm/")]
        return {name: archive.read(name) for name in names if name.endswith(".class")}


def test_all_that_is_read_is_written_again(classes: dict[str, bytes]) -> None:
    assert len(classes) > 20
    for name, data in classes.items():
        assert ClassFile(data).to_bytes() == data, name


def test_what_is_no_class_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no class file"):
        ClassFile(b"PK\3\4 something else")


def test_constants_are_added_once(classes: dict[str, bytes]) -> None:
    made = ClassFile(classes[CLASSES[0]])
    assert made.string("new") == made.string("new") and made.type("a/B") == made.type("a/B")
    assert made.method("a/B", "c", "()V") == made.method("a/B", "c", "()V")
    assert made.method("a/B", "c", "()V") != made.method("a/B", "d", "()V")
    again = ClassFile(made.to_bytes())
    assert again.string("new") == made.string("new")


def test_a_class_is_renamed_wherever_it_is_used(classes: dict[str, bytes]) -> None:
    made = ClassFile(classes[CLASSES[0]])
    made.rename("java/util/LinkedHashMap", "java/util/TreeMap")
    data = made.to_bytes()
    assert b"java/util/TreeMap" in data and b"java/util/LinkedHashMap" not in data
    with pytest.raises(ValueError, match="not in list"):
        made.rename("java/util/Absent", "java/util/TreeMap")


def test_a_method_gets_another_body_and_a_new_one_is_added(classes: dict[str, bytes]) -> None:
    made = ClassFile(classes[CLASSES[1]])
    for name in ("run", "added"):
        made.set_code(name, "()V", Code(1, 1, b"\xb1", [Caught(0, 1, 0, 0)], {"Own": b"x"}))
    again = ClassFile(made.to_bytes())
    for name in ("run", "added"):
        code = again.code(name, "()V")
        assert (code.stack, code.local, code.body) == (1, 1, b"\xb1")
        assert code.caught == [Caught(0, 1, 0, 0)] and code.attributes == {"Own": b"x"}
    with pytest.raises(KeyError, match="absent"):
        again.code("absent", "()V")


@pytest.mark.parametrize(
    ("frame", "moved"),
    [
        (b"\x05", b"\xfb\x00\x0d"),
        (b"\x45\x01", b"\xf7\x00\x0d\x01"),
        (b"\xfb\x00\x05", b"\xfb\x00\x0d"),
        (b"\xfc\x00\x05\x01", b"\xfc\x00\x0d\x01"),
        (b"\xff\x00\x05\x00\x00\x00\x00", b"\xff\x00\x0d\x00\x00\x00\x00"),
    ],
    ids=["same", "one on the stack", "same, far", "one more local", "full"],
)
def test_what_is_put_before_code_moves_all_that_points_into_it(frame: bytes, moved: bytes) -> None:
    # The second frame is placed by its distance from the first.
    second = b"\x07"
    code = Code(1, 1, b"\xb1", [Caught(1, 2, 3, 4)], {"StackMapTable": b"\x00\x02" + frame + second})
    code.attributes |= {"LineNumberTable": b"\x00\x00", "Other": b"kept"}
    code.prepend(b"\x00" * 8)
    assert code.body == b"\x00" * 8 + b"\xb1" and code.caught == [Caught(9, 10, 11, 4)]
    assert code.attributes == {"StackMapTable": b"\x00\x02" + moved + second, "Other": b"kept"}


def test_without_frames_nothing_is_moved() -> None:
    code = Code(1, 1, b"\xb1", attributes={"StackMapTable": struct.pack(">H", 0)})
    code.prepend(b"\x00" * 4)
    assert code.attributes == {"StackMapTable": struct.pack(">H", 0)}


def test_switches_stay_aligned() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        Code(1, 1, b"\xb1").prepend(b"\x00")
