"""RULER's tasks that need no data from elsewhere, at any length.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024).
The prompts and the scores are theirs. Where they take essays and lists of words, we take the
embedded novels and their words, so a score is near theirs but not the same.
"""

from mezzo_core.eval.ruler.chains import CHAINS
from mezzo_core.eval.ruler.counts import COUNTS
from mezzo_core.eval.ruler.measure import Found, measure_ruler
from mezzo_core.eval.ruler.needles import NEEDLES
from mezzo_core.eval.ruler.question import Question, Task, fitted, questions, score

TASKS: dict[str, Task] = {task.name: task for task in (*NEEDLES, CHAINS, *COUNTS)}
"""All tasks, by name."""

__all__ = ["TASKS", "Found", "Question", "Task", "fitted", "measure_ruler", "questions", "score"]
