"""Screens for deliveries, attempts and replay jobs."""

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.formats import localize
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from deliveries.admin.shared import MOST, found_by, link, viewable
from deliveries.models import Attempt, Delivery, ReplayJob
from deliveries.replays import (
    NotReplayable,
    cancel_replay_job,
    check_replayable,
    create_replay_job,
    is_outcome_unknown,
    replay_delivery,
    replay_expires_at,
)
from deliveries.services import cancel_delivery
from endpoints.services import Actor, contract_of
from webhookhub.admin import (
    HubModelAdmin,
    ObjectAction,
    ReadOnlyAdmin,
    Refused,
    RequiredReasonForm,
    pre,
    pretty_bytes,
    visible,
)

# The fastest a replay job may be: each step of it is one transaction.
MOST_A_SECOND = 1000
LATE_SECONDS = 30  # from which on people are told that what is due does not go out


class AttemptInline(admin.StackedInline[Attempt, Delivery]):
    """The attempts of a delivery, newest first."""

    model = Attempt
    extra = 0
    can_delete = False
    ordering = ["-number"]
    readonly_fields = [
        "number",
        "started",
        "result",
        "duration",
        "url",
        "address",
        "request",
        "response",
        "body",
    ]
    fields = (*readonly_fields,)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No."""
        return False

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """What a receiver answered is for those who may see payloads."""
        return viewable(request, self.readonly_fields)

    @admin.display(description="started at")
    def started(self, attempt: Attempt) -> str:
        """To the millisecond: to be compared with logs."""
        return attempt.started_at.isoformat(" ", "milliseconds")

    @admin.display(description="result")
    def result(self, attempt: Attempt) -> str:
        """Status or error, in one line."""
        return visible(" · ".join(str(part) for part in (attempt.status, attempt.error, attempt.detail) if part))

    @admin.display(description="duration")
    def duration(self, attempt: Attempt) -> str:
        """The whole, and what it was made of, in milliseconds."""
        if attempt.total_us is None:
            return "–"
        phases = {
            "look-up": attempt.lookup_us,
            "connect": attempt.connect_us,
            "TLS": attempt.tls_us,
            "wait": attempt.wait_us,
        }
        parts = ", ".join(f"{name} {us / 1000:.1f}" for name, us in phases.items() if us is not None)
        return f"{attempt.total_us / 1000:.1f} ms" + (f" ({parts})" if parts else "")

    @admin.display(description="request headers")
    def request(self, attempt: Attempt) -> SafeString:
        """The lines that were sent."""
        return pre("\n".join(attempt.request_headers))

    @admin.display(description="response headers")
    def response(self, attempt: Attempt) -> SafeString:
        """The lines that came back."""
        return pre("\n".join(attempt.response_headers))

    @admin.display(description="response body")
    def body(self, attempt: Attempt) -> SafeString:
        """As much as was kept, escaped."""
        note = "(the rest was not kept)" if attempt.response_truncated else ""
        return format_html("{}<p>{}</p>", pretty_bytes(attempt.response_body), note)


def replay(request: HttpRequest, delivery: Delivery, answers: dict[str, Any]) -> str | HttpResponse:
    """The button that sends a delivery again."""
    try:
        new = replay_delivery(delivery=delivery, actor=Actor.of_request(request), reason=answers["reason"])
    except NotReplayable as error:
        raise Refused(str(error)) from error
    return format_html("Queued as {}.", link(new))


def ask_replay(delivery: Delivery) -> str:
    """What to think of before it is sent again."""
    delivered = delivery.state == Delivery.State.DELIVERED
    twice = "It was delivered: the receiver may process it twice. " if delivered else ""
    return f"Send {delivery} again? {twice}The receiver gets the same event and webhook-id, with a fresh signature."


def why_not_replay(delivery: Delivery) -> str:
    """A delivery under way would reach the receiver twice; for others the contract may say no."""
    try:
        check_replayable(delivery)
    except NotReplayable as error:
        return str(error)
    return ""


def give_up(request: HttpRequest, delivery: Delivery, answers: dict[str, Any]) -> str:
    """The button that gives up a delivery."""
    if not cancel_delivery(delivery=delivery, actor=Actor.of_request(request), reason=answers["reason"]):
        raise Refused("It waits no longer.")
    return "Cancelled. It is not sent any more, unless somebody replays it."


def why_not_cancel(delivery: Delivery) -> str:
    """Only what waits can be given up."""
    waits = delivery.state in (Delivery.State.PENDING, Delivery.State.HELD)
    return "" if waits else f"It does not wait ({delivery.get_state_display().lower()})."


@admin.register(Delivery)
class DeliveryAdmin(ReadOnlyAdmin):
    """Deliveries, with their attempts."""

    list_display = [
        "created_at",
        "shown_state",
        "event_type",
        "endpoint",
        "tenant",
        "result",
        "tries",
        "next_try",
        "typeid",
    ]
    list_display_links = ["created_at", "typeid"]
    list_select_related = ["event", "endpoint__tenant"]
    list_filter = ["state", "trigger"]
    search_fields = ["id"]
    search_ids = {"dlv": "id", "evt": "event_id", "ep": "endpoint_id", "rpl": "replay_job_id"}
    search_help_text = "A whole id: dlv_…, evt_…, ep_… or rpl_…"
    readonly_fields = [
        "shown_state",
        "event_link",
        "endpoint_link",
        "contract_name",
        "trigger",
        "replay_of_link",
        "replayed_by",
        "created_at",
        "next_try",
        "tries",
        "result",
        "finished_at",
        "replay_until",
    ]
    fields = (*readonly_fields,)
    inlines = [AttemptInline]
    object_actions = [
        ObjectAction(
            "replay",
            "Replay…",
            "deliveries.replay_delivery",
            ask_replay,
            replay,
            why_not=why_not_replay,
        ),
        ObjectAction(
            "cancel",
            "Cancel…",
            "deliveries.cancel_delivery",
            lambda delivery: f"Give up {delivery}? It is not sent any more; where events go in order, the next one is.",
            give_up,
            RequiredReasonForm,
            why_not_cancel,
        ),
    ]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """The list, and unless one is searched for, whether what is due does not go out."""
        if "q" not in request.GET and (late := Delivery.objects.all().lateness()) > LATE_SECONDS:
            told = "The oldest due delivery is %.0f s late: are the workers there, and are they enough?"
            messages.warning(request, told % late)
        return super().changelist_view(request, extra_context)

    def get_queryset(self, request: HttpRequest) -> Any:
        """Lists do without the payloads."""
        return super().get_queryset(request).defer("event__payload", "event__projection")

    @admin.display(description="event type")
    def event_type(self, delivery: Delivery) -> str:
        """The event's type."""
        return visible(delivery.event.type)

    @admin.display(description="state", ordering="state")
    def shown_state(self, delivery: Delivery) -> str:
        """The state; what has failed and is tried again is not just pending, and what is dead is so by its contract."""
        if delivery.state == Delivery.State.PENDING and delivery.attempts_made:
            return "Retrying"
        word = delivery.outcome.replace("_", " ")
        is_told = delivery.state == Delivery.State.DEAD and word not in ("", "dead", "dead letter")
        return f"{delivery.get_state_display()} ({word})" if is_told else delivery.get_state_display()

    @admin.display(description="tries", ordering="attempts_made")
    def tries(self, delivery: Delivery) -> int:
        """How often it was sent."""
        return delivery.attempts_made

    @admin.display(description="next try", ordering="due_at")
    def next_try(self, delivery: Delivery) -> str:
        """When it is sent next, where that is known."""
        return str(localize(delivery.due_at)) if delivery.state == Delivery.State.PENDING else "–"

    @admin.display(description="tenant")
    def tenant(self, delivery: Delivery) -> str:
        """The endpoint's tenant."""
        return str(delivery.endpoint.tenant)

    @admin.display(description="last result")
    def result(self, delivery: Delivery) -> str:
        """Status of the last attempt, or what went wrong in its contract's words."""
        found = str(delivery.last_error or delivery.last_status or "–")
        return f"{found}, outcome unknown: it may have it" if is_outcome_unknown(delivery) else found

    @admin.display(description="contract")
    def contract_name(self, delivery: Delivery) -> str:
        """The contract that it keeps to."""
        contract = contract_of(delivery.contract)
        return contract.title if contract else f"{delivery.contract} (not known to this hub)"

    @admin.display(description="can be sent again until")
    def replay_until(self, delivery: Delivery) -> str:
        """`replayExpiresAt`."""
        expires = replay_expires_at(delivery)
        return str(localize(expires)) if expires else "no limit"

    @admin.display(description="event")
    def event_link(self, delivery: Delivery) -> SafeString:
        """The event, by type and id."""
        return format_html("{} {}", visible(delivery.event.type), link(delivery.event))

    @admin.display(description="endpoint")
    def endpoint_link(self, delivery: Delivery) -> SafeString:
        """The endpoint, by name."""
        return format_html("{} of {}", link(delivery.endpoint, delivery.endpoint.name), delivery.endpoint.tenant)

    @admin.display(description="replay of")
    def replay_of_link(self, delivery: Delivery) -> SafeString | str:
        """What it sends again."""
        return link(delivery.replay_of) if delivery.replay_of else "–"

    @admin.display(description="replayed by")
    def replayed_by(self, delivery: Delivery) -> SafeString | str:
        """What has sent it again."""
        return format_html_join(", ", "{}", ((link(one),) for one in delivery.replays.order_by("-id")[:MOST])) or "–"


def cancel(request: HttpRequest, job: ReplayJob, answers: dict[str, Any]) -> str:
    """The button that stops a replay job."""
    if not cancel_replay_job(job=job, actor=Actor.of_request(request)):
        raise Refused("The job had ended before.")
    return "Cancelled. What it had not queued yet stays as it was."


class ReplayJobForm(forms.ModelForm[ReplayJob]):
    """Which deliveries to send again, and how fast."""

    states = forms.MultipleChoiceField(
        choices=[
            (state.value, state.label)
            for state in (
                Delivery.State.DEAD,
                Delivery.State.HELD,
                Delivery.State.DISCARDED,
                Delivery.State.DELIVERED,
            )
        ],
        initial=[Delivery.State.DEAD],
        widget=forms.CheckboxSelectMultiple,
    )

    class Meta:
        model = ReplayJob
        fields = ["endpoint", "states", "created_after", "created_before", "rate", "reason"]

    def clean_rate(self) -> int:
        """A job that queues nothing would never end."""
        if not 1 <= self.cleaned_data["rate"] <= MOST_A_SECOND:
            raise ValidationError(f"Give a rate between 1 and {MOST_A_SECOND} deliveries a second.")
        return int(self.cleaned_data["rate"])

    def clean(self) -> None:
        """A window that ends before it begins holds nothing."""
        after, before = self.cleaned_data.get("created_after"), self.cleaned_data.get("created_before")
        if after and before and after >= before:
            raise ValidationError({"created_before": "This must be later than the time above."})


@admin.register(ReplayJob)
class ReplayJobAdmin(HubModelAdmin):
    """Replays in bulk. One is made, watched and cancelled; nothing of it is edited."""

    form = ReplayJobForm
    list_display = [
        "created_at",
        "endpoint",
        "tenant",
        "state",
        "queued",
        "matched",
        "requested_by",
        "reason",
        "typeid",
    ]
    list_display_links = ["created_at", "typeid"]
    list_select_related = ["endpoint__tenant"]
    list_filter = ["state"]
    search_fields = ["id"]
    search_ids = {"rpl": "id", "ep": "endpoint_id"}
    autocomplete_fields = ["endpoint"]
    search_help_text = "A whole id: rpl_… or ep_…"
    readonly_fields = [
        "state",
        "matched",
        "queued",
        "deliveries",
        "requested_by",
        "created_at",
        "finished_at",
    ]
    fields = [*readonly_fields, *ReplayJobForm.Meta.fields]
    object_actions = [
        ObjectAction(
            "cancel",
            "Cancel…",
            "deliveries.add_replayjob",
            lambda job: f"Cancel {job}? {job.queued} of {job.matched} deliveries are queued and will be sent.",
            cancel,
            why_not=lambda job: f"It has ended ({job.get_state_display().lower()})." if job.finished_at else "",
        )
    ]

    @admin.display(description="tenant")
    def tenant(self, job: ReplayJob) -> str:
        """The endpoint's tenant."""
        return str(job.endpoint.tenant)

    @admin.display(description="deliveries")
    def deliveries(self, job: ReplayJob) -> SafeString:
        """Those it made."""
        return found_by(job)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No."""
        return False

    def save_model(self, request: HttpRequest, obj: ReplayJob, form: Any, change: bool) -> None:
        """Freezes and queues it."""
        create_replay_job(job=obj, actor=Actor.of_request(request))

    def response_add(self, request: HttpRequest, obj: ReplayJob, post_url_continue: str | None = None) -> HttpResponse:
        """Says how much it is, where it can be watched and cancelled."""
        messages.success(request, f"Queued. {obj.matched} deliveries match; {obj.rate} a second are sent again.")
        return HttpResponseRedirect(reverse("admin:deliveries_replayjob_change", args=[obj.pk]))
