"""Named datasets, from small files in their official layouts."""

import os
import pickle

import numpy as np
import pytest
import torch
from scipy.io import savemat

from softcell.data import Augment, Resident, _small_datasets, datasets, load
from softcell.errors import UserError

NUM = 20  # images per synthetic file


@pytest.fixture
def small_cifar(monkeypatch):
    monkeypatch.setattr(_small_datasets, "RECORDS", dict.fromkeys(_small_datasets.RECORDS, NUM))


def rows(seed, width=3072):
    return np.random.default_rng(seed).integers(0, 256, (NUM, width), dtype=np.uint8)


def write_cifar(root, name, layout):
    """Write all files of a CIFAR; return them as (stem, pixels, labels)."""
    ten = name == "cifar10"
    stems = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"] if ten else ["train", "test"]
    folder = {
        "cifar10": {"binary": "cifar-10-batches-bin", "python": "cifar-10-batches-py"},
        "cifar100": {"binary": "cifar-100-binary", "python": "cifar-100-python"},
    }[name][layout]
    (root / folder).mkdir(parents=True)
    written = []
    for number, stem in enumerate(stems):
        pixels = rows(number)
        labels = (np.arange(NUM) * 7 + number) % (10 if ten else 100)
        coarse = np.full(NUM, 3)
        if layout == "binary":
            head = [labels] if ten else [coarse, labels]
            record = np.concatenate([np.stack(head, 1).astype(np.uint8), pixels], 1)
            record.tofile(root / folder / f"{stem}.bin")
        else:
            key = b"labels" if ten else b"fine_labels"
            content = {b"data": pixels, key: labels.tolist(), b"coarse_labels": coarse.tolist()}
            (root / folder / stem).write_bytes(pickle.dumps(content, 2))
        written.append((stem, pixels.reshape(-1, 3, 32, 32), labels))
    return root / folder, written


def assert_holds(images, pixels, labels, is_test):
    assert isinstance(images, Resident) and images.is_test == is_test
    assert np.array_equal(images.fetch(torch.arange(len(images))).numpy(), pixels)
    assert images.labels.tolist() == labels.tolist() and images.labels.dtype == torch.int64


@pytest.mark.parametrize("layout", ["binary", "python"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_from_its_folder_or_the_one_above(tmp_path, small_cifar, name, layout):
    folder, written = write_cifar(tmp_path, name, layout)
    for root in (tmp_path, folder, str(folder)):
        found = load(name, root)
        train = written[:-1]
        assert_holds(
            found.train,
            np.concatenate([p for _, p, _ in train]),
            np.concatenate([y for *_, y in train]),
            False,
        )
        assert_holds(found.test, *written[-1][1:], True)
        assert found.num_classes == (10 if name == "cifar10" else 100) == len(set(found.classes))
        assert found.shape == (3, 32, 32) and found.augment == Augment(crop_padding=4, flip=True)


def test_class_names_are_in_the_order_of_their_labels():
    assert _small_datasets._LAYOUTS["cifar10"].classes[3] == "cat"
    fine = _small_datasets._LAYOUTS["cifar100"].classes
    assert list(fine) == sorted(fine) and fine[0] == "apple" and fine[71] == "sea" and fine[99] == "worm"


def test_mean_and_std_match_the_training_images(tmp_path, small_cifar):
    _, written = write_cifar(tmp_path, "cifar10", "binary")
    pixels = np.concatenate([p for _, p, _ in written[:-1]]) / 255
    found = load("cifar10", tmp_path)
    np.testing.assert_allclose(found.mean, pixels.mean((0, 2, 3)))
    np.testing.assert_allclose(found.std, pixels.std((0, 2, 3)))


@pytest.mark.parametrize("cut", [1, 3073])
def test_a_short_cifar_file_is_named(tmp_path, small_cifar, cut):
    folder, _ = write_cifar(tmp_path, "cifar10", "binary")
    path = folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UserError, match=r"data_batch_3\.bin") as caught:
        load("cifar10", tmp_path)
    assert ("3073" in str(caught.value)) == (cut == 1)


def test_a_wrong_cifar_label_or_missing_or_empty_file_is_named(tmp_path, small_cifar):
    folder, _ = write_cifar(tmp_path, "cifar10", "binary")
    path = folder / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[3073 * 4] = 10
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"0\.\.9.*image 4 of .*data_batch_2\.bin has label 10"):
        load("cifar10", tmp_path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"data_batch_2\.bin holds 0"):
        load("cifar10", tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"data_batch_2\.bin is missing"):
        load("cifar10", tmp_path)


def test_the_real_files_must_have_their_full_length(tmp_path):
    write_cifar(tmp_path, "cifar10", "binary")
    with pytest.raises(UserError, match=f"10000 images, but .* holds {NUM}"):
        load("cifar10", tmp_path)


def write_svhn(root, number=NUM, **changes):
    content = {}
    for seed, part in enumerate(("train", "test")):
        pixels = rows(seed).reshape(NUM, 3, 32, 32)
        labels = (np.arange(NUM) % 10 + 1).astype(np.uint8)
        fields = {
            "X": pixels.transpose(2, 3, 1, 0),
            "y": labels[:, None],
            **(changes if part == "train" else {}),
        }
        savemat(root / f"{part}_32x32.mat", {k: v for k, v in fields.items() if v is not None})
        content[part] = pixels, labels.astype(int) % 10
    return content


def test_svhn_is_read_and_label_ten_means_zero(tmp_path):
    (tmp_path / "svhn").mkdir()
    content = write_svhn(tmp_path / "svhn")
    for root in (tmp_path, tmp_path / "svhn"):
        found = load("svhn", root)
        assert_holds(found.train, *content["train"], False)
        assert_holds(found.test, *content["test"], True)
    assert found.classes == tuple("0123456789") and not found.augment.flip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.full((NUM, 1), 11, np.uint8)}, r"1\.\.10.*label 11"),
        ({"y": np.zeros((NUM, 1), np.uint8)}, r"1\.\.10.*label 0"),
        ({"y": np.ones((3, 1), np.uint8)}, "one number per image"),
        ({"y": None}, "with X and y"),
        ({"X": np.zeros((32, 32, 3, NUM))}, "uint8"),
        ({"X": np.zeros((32, 32, NUM), np.uint8)}, r"\[32, 32, 3, N\]"),
    ],
)
def test_wrong_svhn_content_is_named(tmp_path, changes, message):
    write_svhn(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as caught:
        load("svhn", tmp_path)
    assert "train_32x32.mat" in str(caught.value)


def test_damaged_svhn_files_are_named(tmp_path):
    write_svhn(tmp_path)
    path = tmp_path / "test_32x32.mat"
    whole = path.read_bytes()
    for length in (0, 10, 200, 5000, len(whole) - 9):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"test_32x32\.mat"):
            load("svhn", tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"test_32x32\.mat is missing"):
        load("svhn", tmp_path)


def write_imagenet16(root):
    root.mkdir()
    kept = {"train": [], "val": []}
    for number in range(11):
        labels = [(number * NUM + n) % 150 + 1 for n in range(NUM)]
        pixels = rows(number, 768)
        name = "val_data" if number == 10 else f"train_data_batch_{number + 1}"
        content = {"data": pixels, "labels": labels, "mean": pixels.mean(0)}
        (root / name).write_bytes(pickle.dumps(content, 2 + number % 3))
        part = kept["val" if number == 10 else "train"]
        part += [(row, label - 1) for row, label in zip(pixels, labels, strict=True) if label <= 120]
    return kept


def test_imagenet16_keeps_the_first_120_classes_from_zero(tmp_path):
    kept = write_imagenet16(tmp_path / "ImageNet16")
    for root in (tmp_path, tmp_path / "ImageNet16"):
        found = load("imagenet16-120", root)
        for images, part in ((found.train, "train"), (found.test, "val")):
            pixels, labels = zip(*kept[part], strict=True)
            assert_holds(images, np.stack(pixels).reshape(-1, 3, 16, 16), np.array(labels), part == "val")
    assert found.num_classes == 120 and found.shape == (3, 16, 16)


def test_wrong_imagenet16_files_are_named(tmp_path):
    write_imagenet16(tmp_path / "ImageNet16")
    path = tmp_path / "ImageNet16" / "train_data_batch_7"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(UserError, match="train_data_batch_7"):
        load("imagenet16-120", tmp_path)
    path.write_bytes(pickle.dumps({"data": rows(0, 768), "labels": [0] * NUM}, 2))
    with pytest.raises(UserError, match=r"1\.\.1000.*train_data_batch_7 has label 0"):
        load("imagenet16-120", tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="train_data_batch_7 is missing"):
        load("imagenet16-120", tmp_path)


def test_digits_come_with_the_package_and_equal_their_source():
    sklearn_datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn has the source")
    found, source = load("digits"), sklearn_datasets.load_digits()
    assert found.shape == (1, 8, 8) and (len(found.train), len(found.test)) == (1347, 450)
    assert found.augment == Augment(crop_padding=1) and "CC BY 4.0" in found.source
    both = torch.cat([images.fetch(torch.arange(len(images))) for images in (found.train, found.test)])
    np.testing.assert_allclose(both[:, 0].double().numpy() * 16 / 255, source.images, atol=16 / 255 / 2)
    assert torch.cat([found.train.labels, found.test.labels]).tolist() == source.target.tolist()


def test_every_name_is_described_and_missing_data_says_where_to_get_it(tmp_path, monkeypatch):
    names = {"digits", "cifar10", "cifar100", "svhn", "imagenet", "imagenet16-120", "cub200", "cub200-boxes"}
    assert set(datasets()) == names and all("\n" not in line for line in datasets().values())
    for name in names - {"digits"}:
        with pytest.raises(UserError, match=r"http|archive") as caught:
            load(name, tmp_path)
        assert str(tmp_path) in str(caught.value)
        monkeypatch.setenv("SOFTCELL_DATA", str(tmp_path))
        with pytest.raises(UserError) as from_variable:
            load(name)
        assert str(from_variable.value) == str(caught.value)


def test_unknown_names_sizes_and_files_are_named(tmp_path):
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        load("cifar_10")
    with pytest.raises(UserError, match="image_size=16 for digits"):
        load("digits", image_size=16)
    assert load("digits", image_size=8).shape == (1, 8, 8)
    with pytest.raises(UserError, match="at least 1"):
        load("digits", image_size=0)
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(UserError, match=r"\.npz"):
        load("a.csv", tmp_path)


@pytest.mark.skipif("SOFTCELL_DATA" not in os.environ, reason="SOFTCELL_DATA names no folder with CIFAR-10")
def test_the_real_cifar10_is_read():
    found = load("cifar10")
    assert (len(found.train), len(found.test)) == (50_000, 10_000)
    np.testing.assert_allclose(found.mean, (0.4914, 0.4822, 0.4465), atol=1e-4)
    np.testing.assert_allclose(found.std, (0.2470, 0.2435, 0.2616), atol=1e-4)
    assert torch.bincount(found.train.labels).tolist() == [5_000] * 10
    assert torch.bincount(found.test.labels).tolist() == [1_000] * 10
    assert found.train.labels[:5].tolist() == [6, 9, 9, 4, 1]
