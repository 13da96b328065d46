"""What all requests have in common.

connections  limits on connections and request heads
middleware   checks of requests, and headers of responses
errors       error responses
metrics      metrics for Prometheus
tracing      traces for OpenTelemetry
logs         a limit on log lines
"""
