"""Which tokens a device has: one run of them, or two that balance causal work."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.checks.arrays import number_array
from ejkernel.checks.options import static_int
from ejkernel.kernels.softmax.spec import Band

LAYOUTS = ("contiguous", "zigzag")


class Shard(NamedTuple):
    """A device's tokens of a sequence: runs of equal length, each from its start on."""

    starts: tuple[Any, ...]
    length: int

    @property
    def index(self) -> jax.Array:
        """The index in the whole sequence of each token, int32."""
        run = jnp.arange(self.length, dtype=jnp.int32)
        return jnp.concatenate([run + jnp.asarray(start, jnp.int32) for start in self.starts])

    def runs(self) -> list[tuple[Any, int, int]]:
        """Of each run, its start in the sequence, and where it begins and ends on the device."""
        return [(start, i * self.length, (i + 1) * self.length) for i, start in enumerate(self.starts)]


def shard_of(layout: str, device: Any, devices: int, length: int) -> Shard:
    """The tokens of a device, which has `length` of them."""
    if layout == "contiguous" or devices == 1:
        return Shard((device * length,), length)
    half = length // 2
    return Shard((device * half, (2 * devices - 1 - device) * half), half)


def _checked(x: Any, devices: Any, axis: Any) -> tuple[jax.Array, int, int]:
    """All three, the axis from the front."""
    x, devices, axis = number_array("x", x), static_int("devices", devices, 1), static_int("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis} must be one of x, whose shape is {x.shape}")
    axis %= x.ndim
    if x.shape[axis] % (2 * devices):
        raise ValueError(
            f"a length of {x.shape[axis]} of x does not divide into 2 * {devices} chunks, two for each device: pad it "
            f"to {-(-x.shape[axis] // (2 * devices)) * 2 * devices}"
        )
    return x, devices, axis


def to_zigzag(x: Any, devices: int, axis: int = 1) -> jax.Array:
    """Tokens in the order in which `layout="zigzag"` of `ring_attention` has them.

    Device r of n then has chunks r and 2n - 1 - r of 2n: with a causal mask all have the same work. Use it once on what
    goes into a model (tokens, targets, positions, segment ids), and `from_zigzag` on what comes out.

    Args:
        x: any array with an axis of tokens.
        devices: how many the tokens are split over; twice this divides their number.
        axis: that of the tokens.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import from_zigzag, to_zigzag
    >>> to_zigzag(jnp.arange(8), 2, axis=0).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    >>> from_zigzag(to_zigzag(jnp.arange(8), 2, axis=0), 2, axis=0).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    x, devices, axis = _checked(x, devices, axis)
    length = x.shape[axis]
    first, last = jnp.split(x, 2, axis)
    chunks = (*x.shape[:axis], devices, length // (2 * devices), *x.shape[axis + 1 :])
    pairs = [first.reshape(chunks), jnp.flip(last.reshape(chunks), axis)]
    return jnp.stack(pairs, axis + 1).reshape(x.shape)


def from_zigzag(x: Any, devices: int, axis: int = 1) -> jax.Array:
    """Tokens of the zigzag layout in their own order: undoes `to_zigzag`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import from_zigzag
    >>> from_zigzag(jnp.array([[0, 3, 1, 2]]), 2).tolist()
    [[0, 1, 2, 3]]
    """
    x, devices, axis = _checked(x, devices, axis)
    length = x.shape[axis]
    pairs = x.reshape(*x.shape[:axis], devices, 2, length // (2 * devices), *x.shape[axis + 1 :])
    first, last = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return jnp.concatenate([first, jnp.flip(last, axis)], axis).reshape(x.shape)


@partial(jax.jit, static_argnums=(0, 1, 2))
def token_indices(layout: str, devices: int, length: int) -> jax.Array:
    """The index in the sequence of each of its tokens, (1, length) int32, in the order of a layout."""
    x = jnp.arange(length, dtype=jnp.int32)[None]
    return x if layout == "contiguous" or devices == 1 else to_zigzag(x, devices)


class Hops(NamedTuple):
    """How far keys travel: so many devices up, and so many down."""

    up: int
    down: int = 0

    @property
    def number(self) -> int:
        return self.up + self.down


def hops_needed(layout: str, devices: int, T: int, S: int, band: Band, chunk: int | None) -> Hops:
    """The hops after which every device has met all keys that it sees, of `T` queries and `S` keys in all.

    Keys go up: after h hops device r has those of device r - h. A window needs few hops; where some go one way and
    some the other, both ways are shorter than one around.
    """
    seen = _sees(layout, devices, T, S, band, chunk)
    r = np.arange(devices)
    needed = [h for h in range(1, devices) if seen[r, (r - h) % devices].any()]
    around = Hops(max(needed, default=0))
    # the longest run of hops that no device needs is left out
    gaps = [(b - a, a, b) for a, b in zip([0, *needed], [*needed, devices], strict=True)]
    _, up, down = max(gaps)
    both = Hops(up, devices - down)
    return both if both.number < around.number else around


def _sees(layout: str, devices: int, T: int, S: int, band: Band, chunk: int | None) -> np.ndarray:
    """Whether a query of a device sees a key of another: bool (devices, devices)."""

    def bounds(length: int, offset: int) -> np.ndarray:
        """First and last position of the runs of each device: (devices, runs, 2)."""
        shards = [shard_of(layout, r, devices, length // devices) for r in range(devices)]
        return np.array([[(start, start + shard.length - 1) for start in shard.starts] for shard in shards]) + offset

    q, k = bounds(T, S - T)[:, None, :, None], bounds(S, 0)[None, :, None, :]
    seen = np.ones(np.broadcast_shapes(q.shape, k.shape)[:-1], bool)
    if band.lo is not None:
        seen &= k[..., 1] - q[..., 0] >= band.lo
    if band.hi is not None:
        seen &= k[..., 0] - q[..., 1] <= band.hi
    if chunk is not None:
        seen &= (q[..., 0] // chunk <= k[..., 1] // chunk) & (k[..., 0] // chunk <= q[..., 1] // chunk)
    return np.asarray(seen.any((2, 3)))
