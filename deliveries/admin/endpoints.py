"""What concerns the deliveries of tenants and endpoints: switches, verification, tests, rules and credits."""

from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.formats import localize
from django.utils.html import format_html
from django.utils.safestring import SafeString

from deliveries import payloads
from deliveries.admin.shared import found_by, link
from deliveries.control import NotDone, confirm_verification, send_test, start_verification, test_types
from deliveries.models import Credit, Delivery
from deliveries.routing import MAX_DEPTH, view
from deliveries.services import delete_endpoint, pause_endpoints, resume_endpoints, switch_webhooks
from endpoints import admin as endpoints_admin
from endpoints.conditions import compile_condition, read_data
from endpoints.models import Endpoint, Rule, Tenant
from endpoints.services import Actor
from webhookhub.admin import ObjectAction, ReadOnlyAdmin, ReasonForm, Refused, RequiredReasonForm
from webhookhub.ids import typeid, uuid7


def pause(request: HttpRequest, endpoint: Endpoint, answers: dict[str, Any]) -> str:
    """The button that stops deliveries to an endpoint."""
    this = Endpoint.objects.filter(pk=endpoint.pk)
    if not pause_endpoints(this, actor=Actor.of_request(request), reason=answers["reason"]):
        raise Refused("The endpoint was paused before.")
    return f"Paused. {_INACTIVE[endpoint.when_inactive]}"


# What a contract does with deliveries to an endpoint that is not active, for those who pause one.
_INACTIVE = {
    "hold": "What waits for it is on hold, and so is what comes; nothing is lost.",
    "dead": "What waits for it is dead, and so is what comes: its contract keeps nothing. It can be replayed later.",
    "skip": "What waits for it is kept for a replay; of what comes, its contract makes no deliveries.",
}


def resume(request: HttpRequest, endpoint: Endpoint, answers: dict[str, Any]) -> str:
    """The button that lets deliveries to an endpoint go on."""
    this = Endpoint.objects.filter(pk=endpoint.pk)
    if not resume_endpoints(this, actor=Actor.of_request(request), reason=answers["reason"]):
        raise Refused("The endpoint is active.")
    return "Active again. What was on hold for it is queued."


def _why_not_stopped(endpoint: Endpoint, status: Endpoint.Status) -> str:
    if endpoint.status in (status, Endpoint.Status.DELETED):
        return f"It is {endpoint.get_status_display().lower()}."
    waits = endpoint.status == Endpoint.Status.UNVERIFIED and endpoint.needs_challenge
    return "It is not verified yet." if waits else ""


def delete(request: HttpRequest, endpoint: Endpoint, answers: dict[str, Any]) -> str:
    """The button that takes an endpoint out of use for good."""
    if not delete_endpoint(endpoint=endpoint, actor=Actor.of_request(request), reason=answers["reason"]):
        raise Refused("The endpoint had been deleted before.")
    return "Deleted. Nothing is sent to it any more; what is known of its deliveries stays."


class ConfirmForm(ReasonForm):
    """What the receiver was sent."""

    field_order = ["challenge", "reason"]
    challenge = forms.CharField(
        max_length=1_000,
        help_text="As the receiver logged it: the 32 digits, or the whole body.",
        widget=forms.TextInput(attrs={"autocomplete": "off", "class": "vTextField"}),
    )


def challenge(request: HttpRequest, endpoint: Endpoint, answers: dict[str, Any]) -> HttpResponse | str:
    """The button that sends a challenge."""
    try:
        verification = start_verification(endpoint=endpoint, actor=Actor.of_request(request))
    except NotDone as error:
        raise Refused(str(error)) from error
    return format_html(
        "Queued as {}. Look it up at the receiver and confirm it within 24 hours.", link(verification.delivery)
    )


def confirm(request: HttpRequest, endpoint: Endpoint, answers: dict[str, Any]) -> str:
    """The button that takes the challenge back."""
    try:
        confirm_verification(endpoint=endpoint, answer=answers["challenge"], actor=Actor.of_request(request))
    except NotDone as error:
        raise Refused(str(error)) from error
    return "Verified. The endpoint is active and gets what is posted from now on."


def why_not_verify(endpoint: Endpoint) -> str:
    """Most contracts ask for no verification."""
    if not endpoint.needs_challenge:
        return "Its contract asks for no verification."
    return "" if endpoint.status == Endpoint.Status.UNVERIFIED else f"It is {endpoint.get_status_display().lower()}."


def test_form(endpoint: Endpoint) -> type[forms.Form]:
    """Which test to send to an endpoint."""
    types = test_types(endpoint)

    class TestForm(ReasonForm):
        field_order = ["event_type", "reason"]
        event_type = forms.ChoiceField(label="Type", choices=[(name, name) for name in types])

    return TestForm


def test(request: HttpRequest, endpoint: Endpoint, answers: dict[str, Any]) -> HttpResponse | str:
    """The button that sends a test."""
    try:
        delivery = send_test(endpoint=endpoint, event_type=answers["event_type"], actor=Actor.of_request(request))
    except NotDone as error:
        raise Refused(str(error)) from error
    return format_html("Queued as {}.", link(delivery))


@admin.register(Endpoint)
class EndpointAdmin(endpoints_admin.EndpointAdmin):
    """Endpoints, with the buttons that concern their deliveries."""

    def save_model(self, request: HttpRequest, obj: Endpoint, form: Any, change: bool) -> None:
        """What waits gets its turn when events are to go in order from now on."""
        super().save_model(request, obj, form, change)
        if change and obj.ordered and "ordered" in form.changed_data:
            Delivery.objects.all().put_in_order(obj.pk)

    fields = [*endpoints_admin.EndpointAdmin.fields, "first_in_line", "verification", "deliveries"]
    readonly_fields = [*endpoints_admin.EndpointAdmin.readonly_fields, "first_in_line", "verification", "deliveries"]
    object_actions = [
        ObjectAction(
            "pause",
            "Pause…",
            "endpoints.pause_endpoint",
            lambda endpoint: f"Pause “{endpoint}”? {_INACTIVE[endpoint.when_inactive]}",
            pause,
            RequiredReasonForm,
            lambda endpoint: _why_not_stopped(endpoint, Endpoint.Status.PAUSED),
        ),
        ObjectAction(
            "resume",
            "Resume…",
            "endpoints.pause_endpoint",
            lambda endpoint: f"Resume “{endpoint}”? What is on hold for it is sent now.",
            resume,
            why_not=lambda endpoint: _why_not_stopped(endpoint, Endpoint.Status.ACTIVE),
        ),
        ObjectAction(
            "test",
            "Send test…",
            "endpoints.test_endpoint",
            lambda endpoint: f"Send synthetic data to “{endpoint}”? It is sent once, costs nothing and counts nowhere.",
            test,
            test_form,
            lambda endpoint: (
                f"It is {endpoint.get_status_display().lower()}."
                if endpoint.status in (Endpoint.Status.UNVERIFIED, Endpoint.Status.DELETED)
                else ""
            ),
        ),
        ObjectAction(
            "challenge",
            "Send challenge…",
            "endpoints.verify_endpoint",
            lambda endpoint: f"Send a challenge to {endpoint.url}? An earlier one is void then.",
            challenge,
            why_not=why_not_verify,
        ),
        ObjectAction(
            "confirm",
            "Confirm challenge…",
            "endpoints.verify_endpoint",
            lambda endpoint: f"Paste the challenge that the receiver of “{endpoint}” was sent.",
            confirm,
            ConfirmForm,
            why_not_verify,
        ),
        *endpoints_admin.EndpointAdmin.object_actions,
        ObjectAction(
            "remove",
            "Delete…",
            "endpoints.delete_endpoint",
            lambda endpoint: (
                f"Delete “{endpoint}” for good? Nothing is sent to it any more, what waits for it is dead, and its "
                "secrets and keys are removed. What is known of its deliveries stays."
            ),
            delete,
            RequiredReasonForm,
            lambda endpoint: "It has been deleted." if endpoint.status == Endpoint.Status.DELETED else "",
        ),
    ]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """By its own button, which keeps the history."""
        return False

    @admin.display(description="first in line")
    def first_in_line(self, endpoint: Endpoint) -> SafeString | str:
        """What the others wait for, where events go in order."""
        heads = Delivery.objects.all().heads([endpoint.pk]) if endpoint.ordered else []
        if not heads:
            return "–"
        delivery = Delivery.objects.get(pk=heads[0].id)
        made = f"{delivery.attempts_made} attempts made"
        when = f"the next at {localize(delivery.due_at)}" if heads[0].is_pending else "one under way"
        return format_html("{}: {}, {}. The others wait until it has ended.", link(delivery), made, when)

    @admin.display(description="verification")
    def verification(self, endpoint: Endpoint) -> SafeString | str:
        """How far the last challenge is."""
        last = endpoint.verifications.select_related("delivery").order_by("-id").first()
        if last is None:
            return "–" if why_not_verify(endpoint) else "No challenge has been sent yet."
        if last.confirmed_at or last.voided_at:
            return "Confirmed." if last.confirmed_at else "The last challenge is void; send a new one."
        state = last.delivery.get_state_display()
        return format_html("Challenge {}: {}, valid until {}.", link(last.delivery), state, last.expires_at)

    @admin.display(description="deliveries")
    def deliveries(self, endpoint: Endpoint) -> SafeString:
        """Those to it."""
        return found_by(endpoint)


def switch(request: HttpRequest, tenant: Tenant, *, enabled: bool, reason: str) -> str:
    """The buttons of a tenant's webhooks."""
    if not switch_webhooks(tenant=tenant, enabled=enabled, actor=Actor.of_request(request), reason=reason):
        raise Refused("They were so before.")
    if enabled:
        return "On. What was on hold for active endpoints is queued."
    return "Off. Events are taken in; nothing is sent, and what waits is on hold or dead, as its contract says."


@admin.register(Tenant)
class TenantAdmin(endpoints_admin.TenantAdmin):
    """Tenants, with the switch of their webhooks."""

    list_display = ["name", "webhooks_enabled", "typeid", "created_at"]
    fields = ["typeid", "name", "webhooks_enabled", "credits", "created_at"]
    readonly_fields = ["typeid", "webhooks_enabled", "credits", "created_at"]
    object_actions = [
        ObjectAction(
            "webhooks_off",
            "Webhooks off…",
            "endpoints.switch_webhooks",
            lambda tenant: f"Switch all webhooks of “{tenant}” off? Its events are taken in, and nothing is sent.",
            lambda request, tenant, answers: switch(request, tenant, enabled=False, reason=answers["reason"]),
            RequiredReasonForm,
            lambda tenant: "" if tenant.webhooks_enabled else "They are off.",
        ),
        ObjectAction(
            "webhooks_on",
            "Webhooks on…",
            "endpoints.switch_webhooks",
            lambda tenant: f"Switch the webhooks of “{tenant}” on?",
            lambda request, tenant, answers: switch(request, tenant, enabled=True, reason=answers["reason"]),
            why_not=lambda tenant: "They are on." if tenant.webhooks_enabled else "",
        ),
    ]

    @admin.display(description="credits charged")
    def credits(self, tenant: Tenant) -> SafeString:
        """What its conditional events have cost."""
        ledger = reverse("admin:deliveries_credit_changelist")
        return format_html('<a href="{}?q={}">Show them</a>', ledger, tenant.typeid)


class TrialForm(ReasonForm):
    """An event's data to try a condition on."""

    field_order = ["payload", "reason"]
    payload = forms.CharField(
        label="Data", widget=forms.Textarea(attrs={"rows": 10, "cols": 80}), help_text="The data of an event, as JSON."
    )

    def clean_payload(self) -> Any:
        """The JSON."""
        try:
            payload = self.cleaned_data["payload"].encode()
            payloads.check(payload, max_depth=MAX_DEPTH)
            return read_data(payload)
        except ValueError as error:
            raise forms.ValidationError(f"This cannot be the data of an event: {error}") from error


def dry_run(request: HttpRequest, rule: Rule, answers: dict[str, Any]) -> str:
    """The button that tries a rule; nothing is stored, sent or charged."""
    event = view(uuid7(), rule.event_type, answers["payload"])
    matches, reason = compile_condition(rule.condition).explain(event)
    return f"It matches: such an event would go to “{rule.endpoint}”." if matches else f"It does not match: {reason}"


@admin.register(Rule)
class RuleAdmin(endpoints_admin.RuleAdmin):
    """Rules, which can be tried without sending anything."""

    object_actions = [
        ObjectAction(
            "dry_run",
            "Dry run…",
            "endpoints.view_rule",
            lambda rule: f"Try “{rule}” on the data of an event? Nothing is stored, sent or charged.",
            dry_run,
            TrialForm,
        )
    ]


@admin.register(Credit)
class CreditAdmin(ReadOnlyAdmin):
    """The ledger of credits, which is only ever added to."""

    list_display = ["created_at", "tenant", "event", "endpoint", "amount", "typeid"]
    list_display_links = ["created_at", "typeid"]
    list_select_related = ["tenant"]
    search_fields = ["id"]
    search_ids = {"crd": "id", "ten": "tenant_id", "evt": "event_id", "ep": "endpoint_id", "dlv": "delivery_id"}
    search_help_text = "A whole id: crd_…, ten_…, evt_…, ep_… or dlv_…"
    readonly_fields = ["tenant", "event", "endpoint", "delivery", "amount", "created_at"]
    fields = (*readonly_fields,)

    @admin.display(description="event")
    def event(self, credit: Credit) -> SafeString:
        """Its id; the event may be gone."""
        return format_html("<code>{}</code>", typeid("evt", credit.event_id))

    @admin.display(description="endpoint")
    def endpoint(self, credit: Credit) -> SafeString:
        """Its id."""
        return format_html("<code>{}</code>", typeid("ep", credit.endpoint_id))

    @admin.display(description="delivery")
    def delivery(self, credit: Credit) -> SafeString:
        """The one that arrived."""
        return format_html("<code>{}</code>", typeid("dlv", credit.delivery_id))
