"""The commands, run in the test's own process or as a person runs them."""

from typer.testing import CliRunner, Result

from pods_rl.cli.commands import app


def pods(*words: object) -> Result:
    """Run a command in this process; a mistake of the user's is raised as UserError."""
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
