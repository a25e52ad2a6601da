from django.db import migrations, models
from django.db.models.functions import Now

from endpoints.catalogues import BETTERSTOOD, CLASSES_BY_NAME


def add_classes_by_name(apps, schema_editor):
    """What is never sent was kept back at the top of the data alone. Gaps are then tried again."""
    types = apps.get_model("endpoints", "EventType").objects.filter(name__in=[kind.name for kind in BETTERSTOOD])
    for kind in types:
        if "x-classes" not in kind.schema:
            schema = {**kind.schema, "x-classes": CLASSES_BY_NAME}
            types.filter(pk=kind.pk).update(schema=schema, schema_at=Now())


class Migration(migrations.Migration):

    dependencies = [
        ('endpoints', '0003_three_contracts'),
    ]

    operations = [
        migrations.AlterField(
            model_name='eventtype',
            name='schema',
            field=models.JSONField(blank=True, default=dict, help_text='JSON Schema of the data. "x-class" gives a field\'s class: identifier, key, label, email, phone, text, collection, or excluded; "x-classes" that of all fields of a name.'),
        ),
        migrations.RunPython(add_classes_by_name, migrations.RunPython.noop),
    ]
