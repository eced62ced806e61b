"""What the guide to clusters says about errors is what the code says, word for word."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "cluster.md").read_text()
RING = ROOT / "crates" / "ring" / "src"
SOURCES = [
    RING / "error.rs",
    RING / "message.rs",
    RING / "transport.rs",
    RING / "transport" / "mpi.rs",
    *sorted((RING / "transport" / "mpi").glob("*.rs")),
    ROOT / "crates" / "cli" / "src" / "ring.rs",
    ROOT / "crates" / "cli" / "src" / "ring" / "agree.rs",
    *sorted((ROOT / "python" / "src").glob("ring*.rs")),
    *sorted((ROOT / "python" / "longspan" / "torch").glob("_r*.py")),
    ROOT / "python" / "longspan" / "torch" / "_post.py",
    ROOT / "python" / "longspan" / "torch" / "_pass_watch.py",
]


def literals(path):
    """A file with each of its strings on one line."""
    text = path.read_text()
    text = re.sub(r'"\s*\n\s*f?"', "", text) if path.suffix == ".py" else text
    return re.sub(r"\\\n\s*", "", text).replace('\\"', '"')


CODE = "\n".join(map(literals, SOURCES))
#: In the first column of tables.
QUOTED = re.findall(r"^\| `([^`]+)` \|", GUIDE[GUIDE.index("## When it fails") :], re.MULTILINE)


def in_code(text):
    """Whether it is a string of the code, or two that are put together."""
    joints = [0, *(joint.start() for joint in re.finditer(r"\b|\s", text))]
    return any(text[:at] in CODE and text[at:] in CODE for at in joints)


def test_every_error_of_the_guide_is_in_the_code():
    assert len(QUOTED) > 40
    parts = [part for quoted in QUOTED for part in quoted.split("…") if part]
    assert [part for part in parts if not in_code(part)] == []
    # It would notice.
    assert not in_code(" haven't takn what was sent")


def test_every_error_of_ring_is_in_the_guide():
    errors = re.findall(r'#\[error\(\s*"((?:[^"\\]|\\.)*)"', literals(RING / "error.rs"))
    assert len(errors) > 15
    for error in errors:
        # What is left when values are left out.
        longest = max(re.split(r"\{[^}]*\}", error), key=len)
        assert longest in GUIDE, error
