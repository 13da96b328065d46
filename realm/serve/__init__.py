"""The servers of `realm serve` and `realm mcp`: the REST API, the web page, tools for agents, and a Python client.

server       the server process
app          the routes of the REST API
schemas      types of requests and responses
responses    responses as JSON values
service      the service between the routes and the knowledge base
mcp          the tools of the Model Context Protocol
batching     batches of questions from many clients
runs         metrics of training runs
settings     settings and limits of the server
client       the Python client
http/        connections, middleware, errors, logs, metrics and traces
page/        the files of the web page
"""
