"""A run in other programs' formats: CSV, Parquet, TensorBoard, LaTeX."""

from .export import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
