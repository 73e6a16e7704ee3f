"""Sweeps: many runs, each in a process and a run directory of its own. Finished runs are skipped, the others
continued."""

from ..lr_find import Rungs
from .grids import grid
from .jobs import Job, commands, examine, make_way, plan, status_table
from .ledger import Ledger
from .rates import TRIAL, SweptTrainer, Unfinished, choose_rate, trials, write_table
from .runner import Outcome, Silent, run
from .show import Display
from .slurm import Submitted, submit
from .tables import table

__all__ = [
    "TRIAL",
    "Display",
    "Job",
    "Ledger",
    "Outcome",
    "Rungs",
    "Silent",
    "Submitted",
    "SweptTrainer",
    "Unfinished",
    "choose_rate",
    "commands",
    "examine",
    "grid",
    "make_way",
    "plan",
    "run",
    "status_table",
    "submit",
    "table",
    "trials",
    "write_table",
]
