"""Batches: order, resume, ranks, small data, worker processes."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from softcell.data import Augment, Batches, Files, Resident
from softcell.errors import UserError


def resident(num=50, shape=(1, 4, 4), **extra):
    pixels = np.random.default_rng(1).integers(0, 256, (num, *shape), dtype=np.uint8)
    return Resident(torch.from_numpy(pixels), torch.arange(num) % 3, **extra)


def batches(images, indices=None, batch_size=8, **changes):
    arguments = {
        "seed": 5,
        "mean": (0.5,) * images.shape[0],
        "std": (0.25,) * images.shape[0],
        "augment": Augment(crop_padding=1, flip=True),
        "shuffle": True,
        "device": "cpu",
        "drop_last": True,
    }
    indices = torch.arange(len(images)) if indices is None else indices
    return Batches(images, indices, batch_size, **{**arguments, **changes})


def equal(first, second):
    return all(torch.equal(getattr(first, f), getattr(second, f)) for f in ("images", "labels", "index"))


@given(st.integers(1, 40), st.integers(1, 12), st.booleans(), st.integers(0, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_a_resumed_epoch_gives_exactly_the_remaining_batches(num, size, drop_last, epoch, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = batches(resident(), torch.arange(num) + 5, size, drop_last=drop_last)
    whole = list(loader.epoch(epoch))
    assert len(whole) == loader.num_batches
    start = data.draw(st.integers(0, loader.num_batches))
    rest = list(loader.epoch(epoch, start=start))
    assert len(rest) == loader.num_batches - start
    assert all(equal(a, b) for a, b in zip(whole[start:], rest, strict=True))


@given(st.integers(1, 50), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_ranks_together_equal_one_rank(num, world, per_rank, drop_last):
    if drop_last and num < world:
        return
    options = {"batch_size": world * per_rank, "drop_last": drop_last}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = [batches(resident(), torch.arange(num), rank=r, world=world, **options) for r in range(world)]
        # One rank never needs to shrink to a multiple of the world, so it is given the size they found.
        alone = batches(resident(), torch.arange(num), ranks[0].batch_size, drop_last=drop_last)
    seen = []
    for parts in zip(alone.epoch(2), *(rank.epoch(2) for rank in ranks), strict=True):
        one, *many = parts
        for field in ("images", "labels", "index"):
            joined = torch.cat([getattr(part, field) for part in many])
            assert torch.equal(joined, getattr(one, field))
        if drop_last:
            assert len({len(part.index) for part in many}) == 1
        seen += one.index.tolist()
    assert len(set(seen)) == len(seen)
    if not drop_last:
        assert sorted(seen) == list(range(num))


def test_epochs_differ_in_order_and_augmentation_and_evaluation_does_not():
    train = batches(resident())
    first, again, other = (list(train.epoch(epoch)) for epoch in (0, 0, 1))
    assert all(equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a.index, b.index) for a, b in zip(first, other, strict=True))
    by_number = [
        dict(zip(torch.cat([b.index for b in epoch]).tolist(), torch.cat([b.images for b in epoch]), strict=True))
        for epoch in (first, other)
    ]
    both = by_number[0].keys() & by_number[1].keys()
    assert sum(torch.equal(by_number[0][number], by_number[1][number]) for number in both) < len(both) / 2
    evaluation = batches(resident(), augment=None, shuffle=False, drop_last=False)
    assert all(equal(a, b) for a, b in zip(evaluation.epoch(0), evaluation.epoch(1), strict=True))
    assert torch.equal(torch.cat([b.index for b in evaluation.epoch(0)]), torch.arange(50))
    assert [len(b.index) for b in evaluation.epoch(0)] == [8] * 6 + [2]


def test_batches_carry_the_right_pixels_and_labels():
    images = resident()
    indices = torch.tensor([3, 11, 40, 7])
    loader = batches(images, indices, 2, augment=None, dtype=torch.float64)
    for batch in loader.epoch(0):
        expected = (images.fetch(batch.index).double() / 255 - 0.5) / 0.25
        torch.testing.assert_close(batch.images, expected)
        assert torch.equal(batch.labels, batch.index % 3)
    assert sorted(torch.cat([b.index for b in loader.epoch(0)]).tolist()) == sorted(indices.tolist())


def test_crops_do_not_depend_on_the_order():
    """Both come from one seed: with one hash for both, early images would be cropped high and late ones low."""
    num = 2_000
    ramp = (torch.arange(4, dtype=torch.uint8) + 1).view(1, 1, 4, 1).expand(num, 1, 4, 4)
    images = Resident(ramp.contiguous(), torch.zeros(num, dtype=torch.int64))
    loader = batches(images, batch_size=num // 2, augment=Augment(crop_padding=3), mean=(0.0,), std=(1 / 255,))
    means = [batch.images.amax(dim=(1, 2, 3)).mean().item() for batch in loader.epoch(0)]
    assert abs(means[0] - means[1]) < 0.2


def test_small_data_shrinks_the_batch_with_a_warning():
    with pytest.warns(UserWarning, match="using 6"):
        loader = batches(resident(7), batch_size=16, world=2, rank=1)
    assert loader.batch_size == 6 and loader.num_batches == 1
    assert len(next(loader.epoch(0)).index) == 3
    with pytest.raises(UserError, match="at least one sample per rank"):
        batches(resident(1), batch_size=16, world=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 7, "world": 2}, "multiple of the number of ranks"),
        ({"batch_size": 0}, "positive multiple"),
        ({"rank": 1}, "rank=1, world=1"),
        ({"indices": torch.arange(0)}, "m >= 1"),
        ({"indices": torch.arange(3.0)}, "int64"),
        ({"indices": torch.tensor([50])}, r"in 0\.\.49"),
        ({"indices": torch.tensor([-1])}, r"in 0\.\.49"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        batches(resident(), **changes)


@pytest.mark.parametrize("start", [-1, 8])
def test_a_start_outside_the_epoch_is_named_before_the_first_batch(start):
    with pytest.raises(UserError, match="start"):
        batches(resident()).epoch(0, start=start)


def test_two_loaders_share_one_copy_on_the_device():
    images = resident()
    assert batches(images).images is images
    assert images.to("meta") is not images
    kept = images.to("meta")
    assert images.to("meta") is kept and kept.is_test is False


def test_the_centre_is_seen_in_evaluation_and_all_of_it_in_resized_crops():
    pixels = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    pixels[:, :, 2:6, 2:6] = 255  # a white centre in a black frame
    images = Resident(pixels, torch.zeros(4, dtype=torch.int64), view=(4, 4))
    assert images.shape == (1, 4, 4) and images.fetch(torch.arange(4)).min() == 255
    plain = next(batches(images, batch_size=4, augment=None).epoch(0)).images
    cropped = next(batches(images, batch_size=4, augment=Augment(resized_crop=True)).epoch(0)).images
    flipped = next(batches(images, batch_size=4, augment=Augment(flip=True)).epoch(0)).images
    assert plain.shape == cropped.shape == flipped.shape == (4, 1, 4, 4)
    assert flipped.min() == 2.0
    assert plain.min() == 2.0 and cropped.min() < 2.0


@pytest.fixture
def files(tmp_path):
    """20 images in files, and the same in memory."""
    pixels = np.random.default_rng(2).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    names = [f"é {number}.png" for number in range(20)]
    for name, picture in zip(names, pixels, strict=True):
        Image.fromarray(picture).save(tmp_path / name)
    labels = torch.arange(20) % 4
    on_disk = Files(tmp_path, names, labels, channels=3, size=(8, 8))
    return on_disk, Resident(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), labels)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 2])
def test_files_give_the_batches_that_memory_gives(files, workers, start):
    on_disk, in_memory = files
    options = {"batch_size": 6, "drop_last": False}
    expected = list(batches(in_memory, **options).epoch(1, start))
    found = list(batches(on_disk, workers=workers, **options).epoch(1, start))
    assert len(found) == len(expected) == 4 - start
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_file_in_a_worker_is_a_short_error_that_names_it(files, workers):
    on_disk, _ = files
    path = on_disk.path(13)
    path.write_bytes(path.read_bytes()[:60])
    loader = batches(on_disk, workers=workers, batch_size=5)
    with pytest.raises(UserError) as caught:
        list(loader.epoch(0))
    assert str(path) in str(caught.value) and "Traceback" not in str(caught.value)


def test_workers_leave_the_global_generator_alone(files):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(batches(files[0], workers=1, batch_size=10).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_more_ranks_than_samples_give_empty_batches_from_files(files):
    for images in files:
        parts = [
            list(
                batches(
                    images,
                    torch.arange(2),
                    4,
                    rank=rank,
                    world=4,
                    drop_last=False,
                    workers=0,
                    augment=Augment(resized_crop=True),
                ).epoch(0)
            )
            for rank in range(4)
        ]
        assert [len(part) for part in parts] == [1] * 4
        assert [len(part[0].index) for part in parts] == [0, 1, 0, 1]
        assert parts[0][0].images.shape == (0, 3, 8, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_loader_gives_what_the_cpu_gives(files):
    for images in files:
        for how in (None, Augment(crop_padding=1, flip=True, cutout=3)):
            options = {"batch_size": 6, "augment": how, "drop_last": False, "workers": 1}
            pairs = zip(
                batches(images, device="cuda", **options).epoch(0),
                batches(images, **options).epoch(0),
                strict=True,
            )
            for on_cuda, on_cpu in pairs:
                assert on_cuda.images.is_cuda and on_cuda.labels.is_cuda and on_cuda.index.is_cuda
                assert torch.equal(on_cuda.index.cpu(), on_cpu.index)
                assert torch.equal(on_cuda.labels.cpu(), on_cpu.labels)
                torch.testing.assert_close(on_cuda.images.cpu(), on_cpu.images)
