import pytest
import torch
from mezzo_core import cli


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run here: on the GPU, or on the CPU in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def run_command(capsys):
    """Run a command of a package, without recipes if not said otherwise.

    Return its exit code, its stdout and its stderr.
    """

    def run(*arguments, recipes=dict, **options):
        paper = cli.Paper("mezzo-toy", "A paper.", "0.1.0", recipes, **options)
        with pytest.raises(SystemExit) as end:
            cli.run(cli.make_app(paper), [*map(str, arguments)])
        return end.value.code, *capsys.readouterr()

    return run
