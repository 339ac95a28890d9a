"""A model's options that record which names were looked up in them."""

from __future__ import annotations

from typing import Any


class RecordedOptions(dict[str, Any]):
    """transformer_options that record the names asked for, and those that the call has written
    itself."""

    def __init__(self, asked: set[str], written: set[str], **given: Any) -> None:
        super().__init__(given)
        self.asked, self.written = asked, written

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().setdefault(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.asked.add(key)
        return super().pop(key, *default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.written.add(key)
        super().__setitem__(key, value)

    def copy(self) -> RecordedOptions:
        return RecordedOptions(self.asked, self.written, **self)

    def __ior__(self, other: Any) -> RecordedOptions:  # type: ignore[override, misc]
        """Add entries without recording them as written, because they are what the call begins
        with."""
        self.update(other)
        return self
