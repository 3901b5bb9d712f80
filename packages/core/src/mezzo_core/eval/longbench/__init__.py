"""LongBench on local files: its prompts, its truncation in the middle, its scores."""

from mezzo_core.eval.longbench.measure import TASKS as TASKS
from mezzo_core.eval.longbench.measure import check_length as check_length
from mezzo_core.eval.longbench.measure import measure_longbench as measure_longbench
from mezzo_core.eval.longbench.measure import read_questions as read_questions
