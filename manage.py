#!/usr/bin/env python
"""Django's command line. Without DATABASE_URL and REDIS_URL it runs on the embedded servers, started as needed."""

import os
import sys


def main() -> None:
    """Runs one management command."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webhookhub.settings")
    from django.core.management import execute_from_command_line

    from webhookhub import embedded
    from webhookhub.env import SettingError

    try:
        with embedded.servers():
            execute_from_command_line(sys.argv)
    except SettingError as error:
        sys.exit(f"{sys.argv[0]}: {error}")


if __name__ == "__main__":
    main()
