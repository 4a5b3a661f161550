"""The one error that a person is meant to read: what is wrong, where, and the cure, in one line."""


class UserError(ValueError):
    """Something in the user's input has to change. The command line prints it and exits with 2."""

    told = False  # whether another process has printed it already

    def __init__(self, what: str, *, where: object | None = None, cure: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.cure = cure
        place = f"{self.where}: " if self.where else ""
        remedy = f" ({cure})" if cure else ""
        super().__init__(f"{place}{what}{remedy}")
