"""The layer x step map as an image, for trackers that take images."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..schema import Cells, Table

PICTURED = "grad_norm"  # the table of the image
EVERY = 50  # rows from one image to the next
WIDEST, TALL = 400, 4  # the latest rows, as columns of an image; height of a layer in pixels


class LayerMap:
    """The rows of the table PICTURED as the columns of an image; the layers of a stack go from the bottom up."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: list[np.ndarray] = []

    def take(self, tables: Mapping[str, Cells], definitions: Mapping[str, Table]) -> bool:
        """Add a row; return True if an image is due now."""
        if PICTURED not in tables:
            return False
        self._columns = [*self._columns[1 - WIDEST :], _by_layer(tables[PICTURED], definitions[PICTURED])]
        self.rows += 1
        return self.rows % EVERY == 0

    @property
    def has_layers(self) -> bool:
        """False for a model without layers, of which there is no image."""
        return bool(self._columns) and self._columns[-1].size > 0

    def image(self) -> np.ndarray:
        """Return RGB bytes (1, height, width, 3) from the smallest number (dark) to the largest, by logarithms. Numbers
        that are not finite are red; missing numbers and 0 are white."""
        from matplotlib import colormaps

        z = np.stack(self._columns, axis=1)[::-1]  # (layers, rows)
        usual = np.isfinite(z) & (z > 0)
        logs = np.log10(z, where=usual, out=np.zeros(z.shape))
        low, high = (logs[usual].min(), logs[usual].max()) if usual.any() else (0.0, 1.0)
        shade = colormaps["viridis"]((logs - low) / max(high - low, 1e-12))[..., :3]
        shade[np.isnan(z) | (z == 0)] = 1.0
        shade[np.isinf(z)] = (0.84, 0.10, 0.11)
        return np.repeat((255 * shade).round().astype(np.uint8), TALL, axis=0)[None]


def _by_layer(cells: Cells, table: Table) -> np.ndarray:
    """Return the largest number of each layer's rows; inf if one was not finite, NaN if none was measured."""
    measured = cells.values[:, table.columns.index(table.main)]
    values = np.where(np.isfinite(measured), measured, np.inf)
    places: dict[tuple[str, int], list[int]] = {}
    for place, row in enumerate(table.rows):
        if row.layer > 0:
            places.setdefault((row.stack, row.layer), []).append(place)
    return np.array([max((values[i] for i in own if not cells.absent[i]), default=np.nan) for own in places.values()])
