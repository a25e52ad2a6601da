"""Loaded by Python at its start where PYTHONPATH names this folder: the process's clock runs ahead by as many seconds
as the file CLOCK_AHEAD says (a float of 8 bytes, which may change at any time).
"""

import datetime
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

with Path(os.environ["CLOCK_AHEAD"]).open("rb") as file:
    _shared = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
_time, _datetime = time.time, datetime.datetime


def _ahead() -> float:
    return float(struct.unpack("d", _shared[:])[0])


class _Kind(type(datetime.datetime)):  # type: ignore[misc]
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, _datetime)


class _Shifted(datetime.datetime, metaclass=_Kind):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # none is ever made: libraries in C know the real type alone
        return _datetime(*args, **kwargs)

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _datetime.now(tz) + datetime.timedelta(seconds=_ahead())


time.time = lambda: _time() + _ahead()
datetime.datetime = _Shifted  # type: ignore[misc]
