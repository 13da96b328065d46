"""The servers of `realm serve` and `realm mcp`: the REST API, the web page, tools for agents, and a Python client.

server       the server process
connections  limits on connections and request heads
middleware   checks of requests, and headers of responses
app          the routes of the REST API
schemas      bodies of requests and responses
errors       error responses
service      the service between the routes and the knowledge base
mcp          the tools of the Model Context Protocol
batching     batches of questions from many clients
runs         metrics of training runs
metrics      metrics for Prometheus
tracing      traces for OpenTelemetry
logs         a limit on log lines
settings     settings and limits of the server
client       the Python client
page/        the files of the web page
"""
