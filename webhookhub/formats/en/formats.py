"""How times look in the admin: to the second, in UTC, the same for everybody."""

DATETIME_FORMAT = "j M Y H:i:s"
