"""Offer metrics to Prometheus, from one process of a machine."""

from contextlib import suppress

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server

metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
with suppress(OSError):
    start_http_server(9464)
