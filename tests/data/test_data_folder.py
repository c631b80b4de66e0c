"""Image folders: odd images, odd sizes, missing parts, damage."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from softcell.data import Augment, Files, Resident, load
from softcell.data.folder import choose_size
from softcell.data.images import DecodeError, _fit, decode
from softcell.errors import UserError

RANDOM = np.random.default_rng(0)


def noise(height, width, channels=3):
    shape = (height, width) if channels == 1 else (height, width, channels)
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def fill(root, counts, make=lambda: noise(8, 8)):
    """Class folders with so many PNG files each."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(make()).save(root / name / f"{number:03}.png")
    return root


@pytest.mark.parametrize("machine", [None, 2**34])
def test_images_too_large_for_the_memory_are_refused_with_size_need_and_option(tmp_path, monkeypatch, machine):
    # None: the system does not report it, and the allocation itself fails.
    monkeypatch.setattr("softcell.data.images.total_memory", lambda: machine)
    fill(tmp_path / "pets", {"dog": 5, "cat": 5})
    why = "that much is not free" if machine is None else "the machine has 16.0 GiB"
    with pytest.raises(
        UserError, match=rf"8 images of 3000000x3000000 pixels need 201,\d+.\d GiB and {why}.*--image-size"
    ):
        load(tmp_path / "pets", image_size=3_000_000)


def test_a_plain_folder_is_read_with_classes_sorted_and_a_test_set_held_out(tmp_path):
    fill(tmp_path / "pets", {"dog": 10, "cat": 20, "Eel": 5})
    (tmp_path / "pets" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "pets" / "cat" / "._001.png").write_bytes(b"x")
    (tmp_path / "pets" / ".hidden").mkdir()
    (tmp_path / "pets" / "README.txt").write_text("about")
    found = load(tmp_path / "pets")
    assert found.classes == ("Eel", "cat", "dog") and found.name == "pets"
    assert torch.bincount(found.train.labels).tolist() == [4, 16, 8]
    assert torch.bincount(found.test.labels).tolist() == [1, 4, 2]
    assert found.shape == (3, 8, 8) and found.augment == Augment(crop_padding=1, flip=True)
    assert isinstance(found.train, Resident) and found.test.is_test and "stratified 7 of 35" in found.source
    same = load("pets", root=tmp_path)
    assert torch.equal(same.test.fetch(torch.arange(7)), found.test.fetch(torch.arange(7)))


def test_pixels_and_labels_stay_together(tmp_path):
    for shade in (10, 90, 200):
        fill(tmp_path, {f"{shade:03}": 6}, lambda shade=shade: np.full((4, 6), shade, np.uint8))
    found = load(tmp_path)
    assert found.shape == (1, 4, 6)  # all grey, and not square
    for images in (found.train, found.test):
        pixels = images.fetch(torch.arange(len(images)))
        assert (pixels == torch.tensor([10, 90, 200])[images.labels].view(-1, 1, 1, 1)).all()


@pytest.mark.parametrize("name", ["test", "val"])
def test_a_test_folder_is_the_test_set(tmp_path, name):
    fill(tmp_path / "train", {"a": 3, "b": 4})
    fill(tmp_path / name, {"b": 2})
    found = load(tmp_path)
    assert (len(found.train), found.test.labels.tolist()) == (7, [1, 1]) and f"test: {name}/" in found.source


def test_test_is_preferred_to_val_with_a_warning(tmp_path):
    for name, count in (("train", 5), ("test", 2), ("val", 3)):
        fill(tmp_path / name, {"a": count, "b": count})
    with pytest.warns(UserWarning, match="val is not used"):
        assert len(load(tmp_path).test) == 4


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, {"train": 5, "bus": 5})
    assert load(tmp_path).classes == ("bus", "train")
    (tmp_path / "train" / "more").mkdir()
    with pytest.warns(UserWarning, match="train/more"):
        assert load(tmp_path).classes == ("bus", "train")


def test_train_alone_holds_out_a_test_set(tmp_path):
    fill(tmp_path / "train", {"a": 5, "b": 5})
    assert len(load(tmp_path).test) == 2


@pytest.mark.parametrize(("counts", "test"), [({"a": 2, "b": 2}, [1, 1]), ({"a": 97, "b": 3}, [19, 1])])
def test_tiny_and_imbalanced_classes_are_on_both_sides(tmp_path, counts, test):
    found = load(fill(tmp_path, counts))
    assert torch.bincount(found.test.labels).tolist() == test
    assert torch.bincount(found.train.labels).min() > 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(30, 50), (30, 50)], (30, 50)),
        ([(50, 60), (70, 50), (90, 100)], (48, 48)),  # 50 rounds to 48
        ([(52, 60), (70, 52), (90, 100)], (56, 56)),
        ([(5, 9), (6, 7)], (32, 32)),
        ([(3000, 4000), (4000, 3000)], (224, 224)),
    ],
)
def test_the_size_is_the_common_one_or_the_median_short_side(sizes, expected):
    size, note = choose_size(sizes)
    assert size == expected and f"{expected[0]}x{expected[1]}" in note


def test_differing_sizes_are_scaled_and_cropped_to_a_square(tmp_path):
    picture = np.zeros((40, 120, 3), np.uint8)
    picture[:, 40:80] = (10, 200, 90)  # the central square
    fill(tmp_path, {"a": 2}, lambda: picture)
    fill(tmp_path, {"b": 2}, lambda: np.ascontiguousarray(picture.transpose(1, 0, 2)))
    found = load(tmp_path)
    assert found.shape == (3, 40, 40) and "centre-cropped to 40x40" in found.source
    pixels = torch.cat([i.fetch(torch.arange(len(i))) for i in (found.train, found.test)])
    assert (pixels == torch.tensor([10, 200, 90], dtype=torch.uint8).view(3, 1, 1)).all()
    small = load(tmp_path, image_size=16)
    assert small.shape == (3, 16, 16)
    whole = Image.fromarray(picture).resize((48, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(small.train.fetch(torch.arange(1))[0], np.asarray(whole)[:, 16:32].transpose(2, 0, 1))


def test_data_beyond_the_memory_limit_is_decoded_from_files_and_is_the_same(tmp_path):
    fill(tmp_path, {"a": 6, "b": 4}, lambda: noise(9, 13))
    in_memory, on_disk = (
        load(tmp_path, memory_limit=10 * 3 * 9 * 13),
        load(tmp_path, memory_limit=10 * 3 * 9 * 13 - 1),
    )
    assert isinstance(in_memory.train, Resident) and isinstance(on_disk.train, Files)
    for first, second in ((in_memory.train, on_disk.train), (in_memory.test, on_disk.test)):
        index = torch.arange(len(first))
        assert torch.equal(first.fetch(index), second.fetch(index))
        assert torch.equal(first.labels, second.labels) and first.is_test == second.is_test
    assert (in_memory.mean, in_memory.std) == (on_disk.mean, on_disk.std)


def saved(path, image, **options):
    image.save(path, **options)
    return path


def test_sixteen_bit_images_are_scaled_to_eight(tmp_path):
    values = np.array([[0, 257, 65535, 32768]], np.uint16)
    path = saved(tmp_path / "a.png", Image.fromarray(values))
    assert decode(path, 1, (1, 4)).tolist() == [[[0, 1, 255, 128]]]
    assert decode(path, 3, (1, 4))[2].tolist() == [[0, 1, 255, 128]]
    path = saved(tmp_path / "a.tiff", Image.fromarray(values.astype(np.int32)))
    assert decode(path, 1, (1, 4)).tolist() == [[[0, 1, 255, 128]]]
    path = saved(tmp_path / "b.tiff", Image.fromarray(values.astype(np.int32) * 2))
    with pytest.raises(UserError, match=r"b\.tiff has 0\.\.131070"):
        decode(path, 1, (1, 4))
    path = saved(tmp_path / "c.tiff", Image.fromarray(values.astype(np.float32)))
    with pytest.raises(UserError, match=r"c\.tiff holds 32-bit floats"):
        decode(path, 1, (1, 4))


def test_transparency_is_laid_over_white(tmp_path):
    pixels = np.array([[[10, 20, 30, 255], [10, 20, 30, 0]]], np.uint8)
    path = saved(tmp_path / "a.png", Image.fromarray(pixels))
    assert decode(path, 3, (1, 2)).transpose(1, 2, 0).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    path = saved(tmp_path / "b.png", Image.fromarray(np.array([[[7, 255], [7, 0]]], np.uint8), "LA"))
    assert decode(path, 1, (1, 2)).tolist() == [[[7, 255]]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([200, 100, 50, 1, 2, 3])
    path = saved(tmp_path / "c.png", palette, transparency=1)
    assert decode(path, 3, (1, 2)).transpose(1, 2, 0).tolist() == [[[200, 100, 50], [255, 255, 255]]]


def test_exif_orientation_is_honoured(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned clockwise to be upright
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            half = np.zeros((16, 32, 3), np.uint8)
            half[:, :16] = 255  # left becomes top
            Image.fromarray(half).save(tmp_path / name / f"{number}.jpg", exif=exif, quality=95)
    found = load(tmp_path)
    assert found.shape == (3, 32, 16)
    pixels = found.train.fetch(torch.arange(1))[0].float()
    assert pixels[:, :14].mean() > 250 and pixels[:, 18:].mean() < 5


def test_images_of_every_kind_may_be_mixed(tmp_path):
    grey, colour = noise(10, 12, 1), Image.fromarray(noise(11, 9))
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        colour.save(folder / "rgb.JPEG")
        colour.save(folder / "rgb.webp")
        colour.save(folder / "rgb.bmp")
        colour.convert("CMYK").save(folder / "cmyk.jpg")
        colour.convert("P").save(folder / "palette.gif")
        colour.convert("1").save(folder / "bits.png")
        colour.convert("RGBA").save(folder / "alpha.png")
        colour.resize((1, 70)).save(folder / "thin.ppm")
        Image.fromarray(grey).save(folder / "grey.pgm")
        Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "deep.tif")
    found = load(tmp_path)
    assert found.shape == (3, 32, 32) and len(found.train) + len(found.test) == 20
    assert load(tmp_path, image_size=8).shape == (3, 8, 8)


def test_a_grey_palette_counts_as_grey(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(noise(8, 8, 1)).convert("P").save(tmp_path / name / "1.gif")
        Image.fromarray(noise(8, 8, 1)).save(tmp_path / name / "2.png")
    assert load(tmp_path).shape[0] == 1


@pytest.mark.parametrize("limit", [0, 1 << 30])
@pytest.mark.parametrize("damage", ["empty", "text", "half"])
def test_an_undecodable_image_is_named(tmp_path, damage, limit):
    fill(tmp_path, {"a": 6, "b": 6}, lambda: noise(20, 20))
    path = tmp_path / "b" / "003.png"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"not an image", "half": whole[: len(whole) // 2]}[damage])

    def read_all():
        found = load(tmp_path, memory_limit=limit)
        for images in (found.train, found.test):
            images.fetch(torch.arange(len(images)))

    with pytest.raises(UserError, match=r"b/003\.png"):
        read_all()


def test_random_damage_never_escapes_as_another_error(tmp_path):
    picture = Image.fromarray(noise(16, 16))
    exif = Image.Exif()
    exif[0x0112] = 3
    for suffix in ("png", "jpg", "gif", "tif", "webp", "bmp"):
        path = tmp_path / f"a.{suffix}"
        picture.save(path, exif=exif) if suffix in ("png", "jpg", "webp") else picture.save(path)
        whole = path.read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            for place in RANDOM.integers(0, min(len(whole), 300), 4):
                damaged[place] = RANDOM.integers(0, 256)
            path.write_bytes(damaged)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    assert decode(path, 3, (8, 8)).shape == (3, 8, 8)
            except UserError as error:
                assert str(path) in str(error)  # noqa: PT017


def test_wrong_folders_are_named(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="at least 2 class folders"):
        load(empty)
    fill(tmp_path / "one", {"a": 5})
    with pytest.raises(UserError, match="at least 2 class folders"):
        load(tmp_path / "one")
    (fill(tmp_path / "hollow", {"a": 3, "b": 3}) / "c").mkdir()
    with pytest.raises(UserError, match=r"hollow/c has none"):
        load(tmp_path / "hollow")
    with pytest.raises(UserError, match=r"class 'b' of .*single has 1"):
        load(fill(tmp_path / "single", {"a": 5, "b": 1}))
    Image.fromarray(noise(8, 8)).save(fill(tmp_path / "stray", {"a": 3, "b": 3}) / "x.png")
    with pytest.raises(UserError, match=r"stray/x\.png is not;"):
        load(tmp_path / "stray")
    fill(tmp_path / "new" / "train", {"a": 3, "b": 3})
    fill(tmp_path / "new" / "test", {"c": 3})
    with pytest.raises(UserError, match="new/test/c is not"):
        load(tmp_path / "new")
    (tmp_path / "high").mkdir()
    for name in ("one", "new"):
        (tmp_path / name).rename(tmp_path / "high" / name)
    with pytest.raises(UserError, match="high/new has none"):
        load(tmp_path / "high")  # one level too high


def test_other_files_in_a_class_folder_are_ignored_with_a_warning(tmp_path):
    fill(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "a" / "notes.txt").write_text("x")
    with pytest.warns(UserWarning, match=r"not images are ignored: a/notes\.txt in"):
        assert len(load(tmp_path).train) == 4


@pytest.mark.parametrize("size", [(28, 28), (100, 130), (224, 224), (3, 7)])
def test_a_picture_of_any_size_is_fitted(size):
    """By rounding the central box may lie outside by 1e-14, which Pillow refuses."""
    for side in range(1, 700, 3):
        for other in (side, side + 38, 2 * side + 1):
            for width, height in ((side, other), (other, side)):
                fitted = _fit(Image.new("L", (width, height), 77), *size)
                assert fitted.size == (size[1], size[0]) and fitted.getextrema() == (77, 77)


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_imagenet_keeps_a_margin_around_what_evaluation_sees(tmp_path, limit):
    frame = np.zeros((64, 80, 3), np.uint8)
    frame[4:60, 12:68] = 255  # the central 56 of a central square of 64
    fill(tmp_path / "imagenet" / "train", {"n01": 3, "n02": 3}, lambda: frame)
    fill(tmp_path / "imagenet" / "val", {"n01": 1, "n02": 2}, lambda: frame)
    for root in (tmp_path, tmp_path / "imagenet"):
        found = load("imagenet", root, image_size=56, memory_limit=limit)
        assert found.shape == (3, 56, 56) and found.augment.resized_crop and len(found.test) == 3
        assert isinstance(found.train, Resident if limit else Files)
        index = torch.arange(6)
        assert found.train.fetch(index).min() == 255
        assert found.train.fetch_stored(index).shape == (6, 3, 64, 64)
        assert found.train.fetch_stored(index)[:, :, 3].max() == 0
    assert load("imagenet", tmp_path, memory_limit=0).shape == (3, 224, 224)


def test_flat_imagenet_validation_files_are_refused(tmp_path):
    fill(tmp_path / "train", {"n01": 3, "n02": 3})
    (tmp_path / "val").mkdir()
    Image.fromarray(noise(8, 8)).save(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(UserError, match=r"val_00000001\.JPEG is not;"):
        load("imagenet", tmp_path)


def test_an_image_without_permission_is_named_once():
    text = str(DecodeError(Path("a.png"), PermissionError(13, "Permission denied", "a.png")))
    assert "but a.png is not (PermissionError: Permission denied);" in text
