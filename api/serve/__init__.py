"""The server: OpenAI's HTTP interface in front of one engine. Not imported by anything but `precast serve`.

Two processes. One speaks HTTP: it checks requests, renders chat templates, makes token ids of text, and counts. The
other has the engine, whose steps nothing there holds up. They share a socket that nobody else has.

    HTTP -> requests (what a body may say) -> prompts, chat (token ids) -> link ==socket==> engine_process -> Engine
    HTTP <- replies  (what a client reads) <-  answering                <- link <==socket== engine_process <- events

`app` has the routes, `http_process` is what runs from the first line to the last.
"""
