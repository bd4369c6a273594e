"""The command line: ``betternorm COMMAND``, one module for each command."""

# Exit codes of every command.
OK, FINDING, BAD_INPUT, INTERRUPTED, PIPE_CLOSED, TERMINATED = 0, 1, 2, 130, 141, 143
