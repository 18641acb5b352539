"""The errors a user can meet. Each says what was got, what was wanted, and what to do next."""


class AutoshardError(Exception):
    """Base of every error that autoshard raises on purpose."""


class MeshError(AutoshardError, ValueError):
    """A mesh or an axis that does not exist, or does not match the devices."""


class PinError(AutoshardError, ValueError):
    """A pin that names no argument, or that its array cannot take."""


class ArgumentError(AutoshardError, TypeError):
    """An argument that is not an array, or does not match the plan."""


class HardwareError(AutoshardError, ValueError):
    """A hardware description that is unknown or incomplete."""


class ProblemError(AutoshardError, ValueError):
    """A problem file that is malformed; the message names the field."""


class PlanError(AutoshardError, ValueError):
    """A plan file of another version, program or mesh."""


class InfeasibleError(AutoshardError):
    """No plan fits the memory limit; the message names the smallest limit that would."""


class NoSolutionError(AutoshardError):
    """The time limit struck before any feasible plan was found."""
