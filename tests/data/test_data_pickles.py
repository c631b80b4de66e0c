"""Pickles are read as data: anything but arrays is refused and never run."""

import io
import pickle
import pickletools

import numpy as np
import pytest

from softcell.data._small_datasets import read_arrays, read_batch
from softcell.errors import UserError


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """The bytes Python 2 wrote for {'data': array, 'labels': list}: all strings are 8-bit SHORT/BINSTRINGs."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + number(len(value))[1:] + value

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    shape = b"(" + b"".join(number(n) for n in data.shape) + b"t"
    dtype = b"cnumpy\ndtype\n" + text(data.dtype.str[1:].encode()) + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + shape + dtype + b"\x89" + text(data.tobytes()) + b"tb"
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


@pytest.fixture
def data():
    return np.random.default_rng(0).integers(0, 256, (4, 12), dtype=np.uint8)


def test_the_emulated_python_2_pickle_is_a_real_one(data):
    content = python2_pickle(data, [1, 2, 3, 4])
    pickletools.dis(content, out=io.StringIO())
    loaded = pickle.loads(content, encoding="bytes")
    assert np.array_equal(loaded[b"data"], data) and loaded[b"labels"] == [1, 2, 3, 4]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("keys", [str, str.encode])
def test_arrays_written_by_python_3_are_read(tmp_path, data, protocol, keys):
    path = tmp_path / "batch"
    content = {keys("data"): data, keys("labels"): [3, 1, 2, 0], keys("name"): "x", keys("f"): data.T}
    path.write_bytes(pickle.dumps(content, protocol))
    rows, labels = read_batch(path, "labels", 12)
    assert np.array_equal(rows, data) and labels.tolist() == [3, 1, 2, 0] and labels.dtype == np.int64
    assert rows.flags.writeable
    assert np.array_equal(read_arrays(path)["f"], data.T)


def test_arrays_written_by_python_2_are_read(tmp_path, data):
    path = tmp_path / "batch"
    path.write_bytes(python2_pickle(data, [0, 0, 9, 1]))
    rows, labels = read_batch(path, "labels", 12)
    assert np.array_equal(rows, data) and labels.tolist() == [0, 0, 9, 1]


@pytest.mark.parametrize("kind", ["<i4", ">i4", "<f8", "|b1", ">u2"])
def test_all_plain_numbers_keep_their_value(tmp_path, kind):
    array = np.arange(6).reshape(2, 3).astype(kind)
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({"data": array}, 2))
    found = read_arrays(path)["data"]
    assert np.array_equal(found, array) and found.shape == (2, 3)


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("place", ["value", "key", "list", "root"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, place):
    trace, path = tmp_path / "trace", tmp_path / "batch"
    bomb = Bomb(trace)
    content = {"value": {"data": bomb}, "key": {(bomb,): 1}, "list": {"data": [bomb]}, "root": bomb}[place]
    dumped = pickle.dumps(content, 2)
    path.write_bytes(dumped)
    with pytest.raises(UserError, match=r"open") as caught:
        read_arrays(path)
    assert str(path) in str(caught.value) and not trace.exists()
    if place == "root":
        pickle.loads(dumped).close()
        assert trace.exists()  # the bomb is a real one


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy\nmemmap\n.",
        b"cnumpy.core.multiarray\nfromfile\n.",
        b"c_codecs\ndecode\n.",
        b"c_codecs\nencode\n(Vx\nVrot13\ntR.",
        b"cnumpy\ndtype\n(VO8\nI0\nI1\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntVb\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",  # STACK_GLOBAL
        b"\x80\x02\x82\x01.",  # EXT1
        b"Pperson\n.",  # persistent id
    ],
)
def test_names_beyond_arrays_are_refused(tmp_path, code):
    path = tmp_path / "batch"
    path.write_bytes(code)
    with pytest.raises(UserError, match="arrays and lists only"):
        read_arrays(path)


def test_an_array_with_a_wrong_number_of_bytes_is_refused(tmp_path, data):
    path = tmp_path / "batch"
    good = pickle.dumps({"data": data}, 3)
    path.write_bytes(good.replace(b"K\x04K\x0c\x86", b"K\x04K\x0d\x86"))
    assert path.read_bytes() != good
    with pytest.raises(UserError, match="do not fill"):
        read_arrays(path)


def test_every_truncation_is_an_error_that_names_the_file(tmp_path, data):
    whole = pickle.dumps({"data": data, "labels": [1, 2, 3, 4]}, 2)
    path = tmp_path / "batch"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="batch"):
            read_arrays(path)


def test_random_damage_never_escapes_as_another_error(tmp_path, data):
    whole = bytearray(pickle.dumps({"data": data, "labels": [1, 2, 3, 4]}, 2))
    path, random = tmp_path / "batch", np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), 3):
            damaged[place] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            read_batch(path, "labels", 12)
        except UserError as error:
            assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "dictionary"),
        ({"labels": [1]}, "key 'data'"),
        ({"data": np.zeros((1, 12), np.uint8)}, "key 'labels'"),
        ({"data": np.zeros((1, 11), np.uint8), "labels": [1]}, r"\[N, 12\]"),
        ({"data": np.zeros((1, 12), np.int64), "labels": [1]}, "uint8"),
        ({"data": [1], "labels": [1]}, "uint8"),
        ({"data": np.zeros((1, 12), np.uint8), "labels": [1, 2]}, "one whole number per row"),
        ({"data": np.zeros((1, 12), np.uint8), "labels": ["a"]}, "one whole number per row"),
        ({"data": np.zeros((1, 12), np.uint8), "labels": np.zeros(1)}, "one whole number per row"),
    ],
)
def test_wrong_content_is_named(tmp_path, content, message):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(content, 2))
    with pytest.raises(UserError, match=message):
        read_batch(path, "labels", 12)
