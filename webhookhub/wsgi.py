"""Django's part of the site as a WSGI application (the API's own view serves `POST /v1/events` here)."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webhookhub.settings")
application = get_wsgi_application()
