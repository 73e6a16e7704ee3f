"""The dimension of the features in the tensors of a norm, and in those of a layer with convolutions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from .naming import kept_tensor, unwrapped
from .structure import is_norm

CONVOLUTIONS = nn.modules.conv._ConvNd


class FeatureAxis:
    """The search for the dimension of a norm's input that its weight spans. It is found at the first call in which only
    one dimension fits.

    ``size``: the size of the weight. ``expected``: the dimension to return if several dimensions have that size.
    """

    def __init__(self, size: int, expected: int) -> None:
        self.size, self.expected = size, expected
        self.known: int | None = None

    def __call__(self, shape: Sequence[int]) -> int:
        """Return the dimension of the features; -1 for the last dimension, or if no dimension has the size."""
        if self.known is not None and -len(shape) <= self.known < len(shape) and shape[self.known] == self.size:
            return self.known
        fitting = [axis for axis in range(min(1, len(shape) - 1), len(shape)) if shape[axis] == self.size]
        named = [-1 if axis == len(shape) - 1 else axis for axis in fitting]
        if len(named) == 1:
            self.known = named[0]
        return self.expected if self.expected in named else named[-1] if named else -1


class ChannelAxis:
    """The search for the dimension of the channels in the tensors of a layer with convolutions: dimension 1, or the
    last one. Sizes decide if only one of the two dimensions fits. Else, until they do, the kinds of modules decide.

    - ``maps``: tensors with at least this many dimensions have their channels in dimension 1 if sizes do not tell.
    - ``first``: numbers of channels of the layer's convolutions, which work on dimension 1.
    - ``last``: numbers of features that the layer's Linears and LayerNorms take, in the last dimension.
    - ``others``: the other numbers of features in the layer. A dimension of one of all these sizes may hold features.
    """

    def __init__(self, maps: int, first: Collection[int], last: Collection[int], others: Collection[int] = ()) -> None:
        self.maps, self.first, self.last = maps, frozenset(first), frozenset(last)
        self.every = self.first.union(last, others)
        self.known: dict[int, int] = {}  # number of dimensions -> where the channels of such a tensor are

    def __call__(self, shape: Sequence[int]) -> int:
        """Return the dimension of the channels, 1 or -1."""
        if len(shape) < 3:
            return -1
        if len(shape) not in self.known:
            if shape[1] in self.first and shape[-1] not in self.every:
                self.known[len(shape)] = 1
            elif shape[-1] in self.last and shape[1] not in self.every:
                self.known[len(shape)] = -1
        return self.known.get(len(shape), 1 if len(shape) >= self.maps else -1)


def of_norm(norm: nn.Module) -> FeatureAxis | None:
    """Return the finder of a norm's feature dimension; None if the features are in the last dimension. None is for
    torch's LayerNorm and RMSNorm, and for norms whose parameters do not say how many features there are."""
    kind = type(unwrapped(norm))
    if _is_last(norm):
        return None
    shape, is_weight = _shape(norm)
    sizes = [size for size in shape if size != 1]
    if len(sizes) > 1 or not (sizes or (is_weight and shape)):
        return None
    maps = getattr(norm, "data_format", "") == "channels_first" or kind.__name__.lower().endswith(("1d", "2d", "3d"))
    return FeatureAxis(sizes[0] if sizes else 1, 1 if maps or (sizes and shape[-1] == 1) else -1)


def _is_last(norm: nn.Module) -> bool:
    return type(unwrapped(norm)).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward)


def _shape(norm: nn.Module) -> tuple[tuple[int, ...], bool]:
    """Return the shape of a norm's weight or its ``normalized_shape``, and True. If the norm has neither, return the
    shape of its floating-point parameters, if they have one shape in common, and False."""
    said = kept_tensor(unwrapped(norm), "weight")
    told = getattr(norm, "normalized_shape", None) if said is None else said.shape
    if told is not None:
        return ((told,) if isinstance(told, int) else tuple(told)), True
    own = unwrapped(norm).parameters(recurse=False)
    shapes = {tuple(each.shape) for each in own if not is_lazy(each) and each.is_floating_point()}
    return (shapes.pop() if len(shapes) == 1 else ()), False


def of_layer(layer: nn.Module) -> ChannelAxis | None:
    """Return the finder of the channels' dimension in a layer's tensors; None for a layer without convolutions, whose
    features are in the last dimension.

    If sizes do not tell, tensors of a layer with convolutions are maps (B, C, H, W); those of a layer without a Linear
    may also be (B, C, T).
    """
    modules = list(layer.modules())
    if not any(isinstance(module, CONVOLUTIONS) for module in modules):
        return None
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    convolved = [size for each in modules if isinstance(each, CONVOLUTIONS) for size in _of(each, "in", "out")]
    taken = [size for each in linears for size in _of(each, "in")]
    norms = [module for module in modules if is_norm(module)]
    taken += [size for each in norms if _is_last(each) for size in _normed(each)]
    others = [size for each in norms for size in _normed(each)]
    others += [size for each in linears for size in _of(each, "out")]
    return ChannelAxis(4 if linears else 3, convolved, taken, others)


def _of(module: nn.Module, *ways: str) -> Iterator[int]:
    """Yield the sizes that a convolution or a Linear takes ("in") or yields ("out")."""
    kind = "channels" if isinstance(module, CONVOLUTIONS) else "features"
    held = vars(module)  # getattr may run code of a class
    yield from (size for way in ways if isinstance(size := held.get(f"{way}_{kind}"), int) and size > 0)


def _normed(norm: nn.Module) -> Iterator[int]:
    """Yield the number of features of a norm, if it has one number of them."""
    sizes = [size for size in _shape(norm)[0] if size != 1]
    if len(sizes) == 1:
        yield sizes[0]
