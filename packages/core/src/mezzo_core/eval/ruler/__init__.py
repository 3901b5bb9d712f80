"""RULER's tasks that need no data from elsewhere, at any length.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024).
The prompts and the scores are theirs. Where they take essays and lists of words, we take the
embedded novels and their words, so a score is near theirs but not the same.
"""

from mezzo_core.eval.ruler.chains import CHAINS
from mezzo_core.eval.ruler.counts import COUNTS
from mezzo_core.eval.ruler.measure import Found as Found
from mezzo_core.eval.ruler.measure import measure_ruler as measure_ruler
from mezzo_core.eval.ruler.needles import NEEDLES
from mezzo_core.eval.ruler.question import Task as Task
from mezzo_core.eval.ruler.question import questions as questions
from mezzo_core.eval.ruler.question import score as score

TASKS: dict[str, Task] = {task.name: task for task in (*NEEDLES, CHAINS, *COUNTS)}
"""All tasks, by name."""
