"""Counter-based random numbers: a 64-bit hash of (seed, epoch, position, stream), on any device.

There is no generator state, so a sample's draw does not depend on its batch, its rank or what was drawn
before, a resumed run repeats it exactly, and a captured CUDA graph can replay it with another epoch.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). torch has no full set of uint64 operations, so 64-bit words live in int64
tensors: products and sums wrap as they should, but `>>` copies the sign bit and needs a mask.
"""

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(word: int) -> int:
    """The int64 with the same 64 bits as `word`."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def shift_right(words: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift of int64 `words` of any shape."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix_int(word: int) -> int:
    word &= _WORD
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return _signed(word ^ (word >> 31))


def _mix_tensor(words: Tensor) -> Tensor:
    words = (words ^ shift_right(words, 30)) * _signed(_FIRST)
    words = (words ^ shift_right(words, 27)) * _signed(_SECOND)
    return words ^ shift_right(words, 31)


def _absorb_int(state: int, value: int) -> int:
    return _mix_int(state + _GOLDEN + value)


def absorb(state: int | Tensor, value: int | Tensor) -> int | Tensor:
    """The state after taking in `value`: mix(state + golden + value).

    For two Python ints the result is a Python int (as int64), so a host-side seed costs no device work and no copy;
    otherwise the two broadcast as int64 tensors.
    """
    if isinstance(state, int) and isinstance(value, int):
        return _absorb_int(state, value)
    start = _signed(state + _GOLDEN) if isinstance(state, int) else state + _signed(_GOLDEN)
    total = start + (_signed(value) if isinstance(value, int) else value.to(torch.int64))
    assert isinstance(total, Tensor)
    return _mix_tensor(total)


def hash_words(seed: int | Tensor, epoch: int | Tensor, position: Tensor, num_streams: int) -> Tensor:
    """Independent 64-bit words, int64 [n, num_streams], for `position` int64 [n].

    `seed` and `epoch` are Python ints or 0-d integer tensors (on the device of `position` if the call is
    to be captured in a CUDA graph). Stream `s` of a position is the same regardless of how many streams are requested.
    """
    state = absorb(absorb(absorb(0, seed), epoch), position)
    streams = torch.arange(num_streams, device=position.device)
    assert isinstance(state, Tensor)
    words = absorb(state[:, None], streams)
    assert isinstance(words, Tensor)
    return words


def to_integer(words: Tensor, bound: int | Tensor) -> Tensor:
    """Integers uniform in 0..bound-1 from int64 `words` of any shape; `bound` < 2**31 broadcasts.

    Multiplies the top 31 bits by the bound instead of taking a remainder: exact in int64 on every device,
    with a bias below bound / 2**31.
    """
    return (shift_right(words, 33) * bound) >> 31


def to_uniform(words: Tensor) -> Tensor:
    """float32 uniform in [0, 1) from int64 `words` of any shape: 24 bits, so never rounded up to 1."""
    return shift_right(words, 40).to(torch.float32) * 2.0**-24


def permutation(seed: int, epoch: int, length: int, purpose: str) -> Tensor:
    """A permutation of 0..length-1, int64 [length] on the CPU: positions sorted by their hash.

    It uses no library's generator, so that it stays the same when torch or numpy changes theirs. `purpose`
    keeps uses apart that share a seed: sorted by the very words that augmentation draws from, the images of
    an epoch would come in the order of their crops.
    """
    for byte in purpose.encode():
        seed = _absorb_int(seed, byte)
    words = hash_words(seed, epoch, torch.arange(length), 1)[:, 0]
    return torch.sort(words, stable=True).indices
