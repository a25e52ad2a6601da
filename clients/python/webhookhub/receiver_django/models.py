"""Which messages were received, and what was answered."""

from django.db import models


class Seen(models.Model):
    """A name of a message: there is one for its key and one for its id."""

    # The primary key is what makes two claims of one message impossible.
    name = models.CharField(primary_key=True, max_length=300)
    until = models.FloatField(help_text="Unix time after which it is forgotten.")
    token = models.CharField(max_length=32, help_text="Whose claim it is.")
    status = models.PositiveSmallIntegerField(null=True, help_text="What was answered; empty while it is processed.")
    body = models.BinaryField(default=b"")
    content_type = models.CharField(max_length=255, default="")

    class Meta:
        app_label = "webhookhub_receiver"
        verbose_name_plural = "seen"
        indexes = [
            models.Index(fields=["until"], name="webhookhub_seen_until"),  # pruning
        ]

    def __str__(self) -> str:
        return self.name
