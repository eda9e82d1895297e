"""An MCP server for tests, of the standard library alone: over stdio, or with streamable HTTP.

    server.py [--log FILE] [--mode MODE] [--only TOOL]    stdio
    server.py --http [--log FILE] [--key KEY] [--busy]    HTTP on a free port of 127.0.0.1, which is printed

Modes: `dies` ends at the start, `silent` never answers, `stubborn` ignores SIGTERM and the end of its input, `noisy` writes lines
that are no messages, `parallel` answers each message on a thread of its own, `endless`
lists the same tools, without schemas, on page after page. With --busy, the first call gets 503. The log has a line per request and notification, and `ended` at an orderly end.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NONE = {"type": "object", "properties": {}}
TOOLS = {
    "echo": ("Say a text again", TEXT),
    "add": ("Add two numbers", {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}),
    "image": ("Draw a picture", NONE),
    "flood": ("Say very much", NONE),
    "fail": ("Fail", NONE),
    "refuse": ("Refuse the call", NONE),
    "die": ("End the server", NONE),
    "hang": ("Take for ever", NONE),
    "grow": ("Offer one more tool", NONE),
    "variable": ("Read a variable", TEXT),
    "now": ("Tell the time", {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}),
}


class Server:
    def __init__(self, options):
        self.options = options
        self.tools = {name: tool for name, tool in TOOLS.items() if options.only in (None, name)}
        self.notices = []

    def log(self, line):
        if self.options.log:
            with open(self.options.log, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def answer(self, message):
        """Returns the answer to a message; None for a notification."""
        method, params = message.get("method"), message.get("params", {})
        if method == "tools/call":
            self.log(f"call {params['name']} {json.dumps(params.get('arguments', {}), sort_keys=True)}")
        else:
            self.log(str(method))
        if "id" not in message or method is None:
            return None
        reply = {"jsonrpc": "2.0", "id": message["id"]}
        try:
            return reply | {"result": self.result(method, params)}
        except KeyError as error:
            return reply | {"error": {"code": -32602, "message": f"there is no {error}"}}

    def result(self, method, params):
        if method == "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "test-server", "version": "1.2"},
            }
        if method == "tools/list":
            return self.page(params.get("cursor"))
        if method == "tools/call":
            return self.call(params["name"], params.get("arguments", {}))
        if method == "ping":
            return {}
        raise KeyError(method)

    def page(self, cursor):
        """Lists the tools, four at a time."""
        names, first = list(self.tools), int(cursor or 0)
        tool = lambda name: {
            "name": name,
            "description": self.tools[name][0],
            "inputSchema": self.tools[name][1],
            "annotations": {"readOnlyHint": True},
        }
        if self.options.mode == "endless":
            return {"tools": [{"name": name} for name in names], "nextCursor": "0"}
        page = {"tools": [tool(name) for name in names[first : first + 4]]}
        return page | ({"nextCursor": str(first + 4)} if first + 4 < len(names) else {})

    def call(self, name, arguments):
        text = lambda text: {"content": [{"type": "text", "text": text}]}
        if name not in self.tools:
            raise KeyError(name)
        if name == "echo":
            return text(arguments["text"])
        if name == "add":
            return {"content": [], "structuredContent": {"sum": arguments["a"] + arguments["b"]}}
        if name == "image":
            return {"content": [{"type": "image", "data": "A" * 16384, "mimeType": "image/png"}]}
        if name == "flood":
            return text("x" * 200_000)
        if name == "fail":
            return text("no luck") | {"isError": True}
        if name == "variable":
            return text(os.environ.get(arguments["text"], "not set"))
        if name == "now":
            return text("noon in " + arguments["zone"])
        if name == "grow":
            self.tools["grown"] = ("A new tool", NONE)
            self.notices.append({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
            return text("grown")
        if name == "die":
            print("the server has had enough", file=sys.stderr, flush=True)
            os._exit(3)
        if name == "hang":
            time.sleep(600)
        raise KeyError("luck")


def speak(server):
    """Answers on stdout until stdin ends."""
    writing = threading.Lock()

    def reply(line):
        answer = server.answer(json.loads(line))
        with writing:
            for message in [*server.notices, answer]:
                if message is not None:
                    print(json.dumps(message), flush=True)
            server.notices.clear()

    for line in sys.stdin:
        if server.options.mode == "parallel":
            threading.Thread(target=reply, args=(line,), daemon=True).start()
        else:
            reply(line)
    server.log("ended")


def stdio(server):
    mode = server.options.mode
    server.log(f"pid {os.getpid()}")
    if mode == "dies":
        print("no configuration\ncannot go on", file=sys.stderr)
        sys.exit(7)
    if mode == "silent":
        time.sleep(600)
    if mode == "noisy":
        print("Starting up...\n{not json", flush=True)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    speak(server)
    while mode == "stubborn":
        time.sleep(1)


def http(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def plain(self, status, body=b"", kind="application/json"):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Mcp-Session-Id", "session-1")
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.plain(405)

        def do_DELETE(self):
            server.log("delete " + self.headers.get("Mcp-Session-Id", ""))
            self.plain(200)

        def do_POST(self):
            text = self.rfile.read(int(self.headers["Content-Length"]))
            if server.options.key and self.headers.get("Authorization") != "Bearer " + server.options.key:
                return self.plain(401, b'{"error": "no"}')
            message = json.loads(text)
            is_first = message.get("method") == "initialize"
            if not is_first and self.headers.get("Mcp-Session-Id") != "session-1":
                return self.plain(400, b"no session", "text/plain")
            if server.options.busy and message.get("method") == "tools/call":
                server.options.busy = False
                return self.plain(503, b"come again", "text/plain")
            answer = server.answer(message)
            if answer is None:
                return self.plain(202)
            if message.get("method") == "tools/call":
                return self.plain(200, f"event: message\ndata: {json.dumps(answer)}\n\n".encode(), "text/event-stream")
            self.plain(200, json.dumps(answer).encode())

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(listening.server_port, flush=True)
    listening.serve_forever()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--log")
    parser.add_argument("--mode")
    parser.add_argument("--only")
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--key")
    parser.add_argument("--busy", action="store_true")
    server = Server(parser.parse_args())
    (http if server.options.http else stdio)(server)


if __name__ == "__main__":
    main()
