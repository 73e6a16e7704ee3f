"""Modules that attend, recognised by the name of their class, by projections they hold, or by kernels they call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from .feedforward import way_back
from .naming import lies_in, modules_of, unwrapped

CALLED = ("attention", "attn", "multihead", "mha")  # in class names
# Names of projections without their decoration: wq, to_q, q_proj, q_a_proj, query, linear_query, ...
_DECORATION = r"(?:{})(?:proj|projection|lin|linear|layer|a|b|aproj|bproj|nope|rope)?"
_PREFIX = r"(?:w|to|fc|lin|linear|in|c|p)?"
QUERY = re.compile(_PREFIX + _DECORATION.format("q|query|queries"))
KEY = re.compile(_PREFIX + _DECORATION.format("k|key|keys|kv|keyvalue"))
VALUE = re.compile(_PREFIX + _DECORATION.format("v|value|values"))
FUSED = re.compile(_PREFIX + _DECORATION.format("qkv|querykeyvalue|qk|inprojweight"))
THIRDS = re.compile(_PREFIX + r"(?:qkv|attn)(?:proj|projection|lin|linear)?")  # one linear for q, k and v
SHARED = re.compile(_PREFIX + _DECORATION.format("kv|keyvalue"))  # one projection for keys and values
BY_HEADS = "querykeyvalue"
TRANSPOSED = "Conv1D"  # Hugging Face's linear, whose weight is (in, out)
KERNELS = {"scaled_dot_product_attention", "flex_attention", "flash_attn_func", "flash_attn_varlen_func"}


def plain(name: str) -> str:
    """Return a name in lower case, letters only: ``q_proj`` becomes ``qproj``."""
    return re.sub(r"[^a-z]", "", name.lower())


def attends(module: nn.Module) -> bool:
    """Return True for a module with parameters that calls itself attention (and is no layer of attention and
    feed-forward), holds projections of queries and keys, or calls a kernel of attention itself."""
    inner = unwrapped(module)
    if next(inner.parameters(), None) is None:
        return False
    if _is_fused(inner):
        return True
    if any(word in type(inner).__name__.lower() for word in CALLED) and not _is_layer(inner):
        return True
    names = [plain(name) for name in (*inner._modules, *inner._parameters)]
    if any(map(FUSED.fullmatch, names)) or (any(map(QUERY.fullmatch, names)) and any(map(KEY.fullmatch, names))):
        return True
    code = getattr(type(inner).forward, "__code__", None)
    return code is not None and not KERNELS.isdisjoint(code.co_names)


def _is_layer(module: nn.Module) -> bool:
    """Return True for a module that holds a module that attends and, outside of that one, a feed-forward block (Zamba's
    AttentionDecoderLayer)."""
    inside = modules_of(module)
    attention = [path for path, each in inside.items() if path and attends(each)]
    homes: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, each in inside.items():
        if not lies_in(path, attention):
            homes.setdefault(path.rpartition(".")[0], []).append((path, each))
    pairs = (way_back(children) for children in homes.values()) if attention else ()
    return any(pair is not None and pair.widening > 0 for pair in pairs)


def _is_fused(module: nn.Module) -> bool:
    """Return True if one linear makes three times its width and another linear keeps that width. In a feed-forward
    block of three times the width, the other linear leads back instead."""
    linears = [child for _, child in module.named_children() if isinstance(child, nn.Linear)]
    widths = {one.in_features for one in linears if one.out_features == 3 * one.in_features}
    return any(one.in_features == one.out_features and one.in_features in widths for one in linears)


def is_projection(path: str, siblings: set[str]) -> bool:
    """Return True if the child ``path`` of a block is a projection of its attention, in a block that holds such
    projections itself. ``siblings``: the names of all children of the block."""
    own = plain(path)
    beside = any(FUSED.fullmatch(plain(name)) or QUERY.fullmatch(plain(name)) for name in siblings)
    if any(pattern.fullmatch(own) for pattern in (QUERY, FUSED)):
        return True
    if any(pattern.fullmatch(own) for pattern in (KEY, VALUE)):
        return beside  # channel mixing (RWKV) has keys and values, and no queries
    return beside and re.fullmatch(_PREFIX + r"(?:o|out|output)(?:proj|projection|lin|linear)?|proj", own) is not None


def _head_size(attention: nn.Module | None, width: int) -> int:
    """Return the size of a head that an attention names; 0 if it names none, or one that does not divide the width."""
    told = (getattr(attention, name, None) for name in ("head_dim", "head_size"))
    size = next((own for own in told if isinstance(own, int)), 0)
    return size if size > 0 and width % size == 0 else 0


def tall(shape: Sequence[int]) -> bool:
    """Return True for the shape of a matrix of three squares, one upon the other: (3 n, n)."""
    return len(shape) == 2 and shape[0] == 3 * shape[1]


def innermost(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the modules that attend and hold no other such module."""
    found = [path for path, module in modules.items() if path and attends(module)]
    outer = {path[:end] for path in found for end, letter in enumerate(path) if letter == "."}
    return [path for path in found if path not in outer]


Part = slice | tuple[slice, slice] | None  # part of a tensor: rows, rows and columns, or all (None)


class WeightPart(NamedTuple):
    """A part of a weight; ``apart``: True if the part makes queries or keys and nothing else."""

    part: Part
    apart: bool


def query_key(name: str, modules: Mapping[str, nn.Module], shape: Sequence[int]) -> list[WeightPart]:
    """Divide a weight of an attention into the parts that make its queries and keys, and the rest.

    The name decides for a single projection. Fused projections are cut if their rows are q, k, v by thirds: torch's
    ``in_proj_weight``, and a linear of nanoGPT's, timm's or flash-attn's name (``c_attn``, ``qkv``, ``Wqkv``, ...) that
    makes three times its width. Hugging Face's ``Conv1D`` (GPT-2's ``c_attn``) is cut by columns. A ``query_key_value``
    of that shape (GPT-NeoX's, BLOOM's, Falcon's) has q, k, v of one head after the other; its attention names the size
    of a head. Any other weight belongs to the rest.
    """
    owner, _, leaf = name.rpartition(".")
    holder, _, called = owner.rpartition(".")
    thirds = THIRDS.fullmatch(plain(called)) is not None
    if leaf == "in_proj_weight" or (thirds and isinstance(modules[owner], nn.Linear) and tall(shape)):
        third = shape[0] // 3
        return [WeightPart(slice(0, 2 * third), True), WeightPart(slice(2 * third, 3 * third), False)]
    if thirds and type(modules[owner]).__name__ == TRANSPOSED and tall(shape[::-1]):
        first, rest = (slice(0, 2 * shape[0]), True), (slice(2 * shape[0], 3 * shape[0]), False)
        return [WeightPart((slice(None), columns), apart) for columns, apart in (first, rest)]
    if plain(called) == BY_HEADS and tall(shape) and (size := _head_size(modules.get(holder), shape[1])):
        parts = [(slice(at, at + 2 * size), slice(at + 2 * size, at + 3 * size)) for at in range(0, shape[0], 3 * size)]
        return [WeightPart(part, part is both[0]) for both in parts for part in both]
    holder, _, last = (owner, "", leaf) if leaf.endswith("proj_weight") else owner.rpartition(".")
    own = plain(last.removesuffix("_weight"))
    single = not SHARED.fullmatch(own) and any(pattern.fullmatch(own) for pattern in (QUERY, KEY))
    return [WeightPart(None, single and holder in modules and attends(modules[holder]))]
