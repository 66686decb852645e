"""Which classes of the proxy Cython is told to make C's, and of what."""

from textwrap import dedent

from class_layouts import layouts
from tests.conftest import ROOT


def declared(source: str) -> list[str]:
    return [line.strip() for line in layouts(dedent(source)).splitlines() if line]


def test_what_methods_set_has_a_place() -> None:
    source = """
    class Call:
        __slots__ = ("_at", "name")
        most = 3

        def __init__(self, name: str) -> None:
            self._at, self.name = 0, name
            self.name = name

        async def move(self) -> None:
            self.late: int = 1
            self._at += 1
    """
    first, *members = declared(source)
    assert first == "cdef class Call:"
    assert sorted(members) == [
        "cdef dict __dict__",
        "cdef object __weakref__",
        "cdef public object _at",
        "cdef public object late",
        "cdef public object name",
    ]


def test_what_the_class_has_a_value_for_stays_the_class_s() -> None:
    source = """
    class Turns:
        field: str = ""
        other = 1

        def __init__(self) -> None:
            self.field = "messages"
            self.other = self.mine = 2
    """
    assert declared(source)[3:] == ["cdef public object mine"]


def test_other_classes_are_left_to_python() -> None:
    """Those with bases, those that are decorated, and those whose subclasses set an attribute."""
    method = "def __init__(self) -> None: self.x = 1"
    assert not layouts(f"class One(Base):\n {method}\n")
    assert not layouts(f"class One(metaclass=Meta):\n {method}\n")
    assert not layouts(f"@final\nclass One:\n {method}\n")
    assert not layouts(f"class One:\n block: Block\n {method}\n")
    assert layouts(f"class One:\n x: Block\n {method}\n")
    assert not layouts("class Shared:\n blocks = None\n")
    assert not layouts("class One:\n @classmethod\n def new(cls) -> None: cls.x = 1\n")


def test_the_classes_on_a_call_s_way_are_c_s() -> None:
    for module, name in {
        "calls/call": "Call",
        "http/exchange": "Exchange",
        "http/flow": "BodyStream",
        "formats/conversation": "Conversation",
        "intake/limits": "Claim",
    }.items():
        source = (ROOT / "proxy" / f"{module}.py").read_text()
        assert f"cdef class {name}:" in layouts(source)
