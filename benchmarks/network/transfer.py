"""One host of a plain TCP transfer, which tells what headers add to payload on this link and how fast it carries payload.

Each host sends to the next one while it receives from the one before, as in a step, so that acknowledgements count too.
Says {"event": "ready"} once connected; "go N" on stdin sends N bytes and receives as many, {"event": "done"} answers.
"""
import json
import socket
import sys
import threading
import time

CHUNK = 1 << 20


def say(**message):
    print(json.dumps(message), flush=True)


def connect(address, port, seconds=60.0):
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((address, port), timeout=seconds)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def main():
    listen_on, send_to, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    listener = socket.create_server((listen_on, port))
    outgoing = connect(send_to, port)
    incoming, _ = listener.accept()
    block = memoryview(bytes(CHUNK))
    say(event="ready")
    for line in sys.stdin:
        command = line.split()
        if command[0] != "go":
            break
        count = int(command[1])

        def send(left=count):
            while left > 0:
                left -= outgoing.send(block[: min(left, CHUNK)])

        begin = time.monotonic()
        sender = threading.Thread(target=send)
        sender.start()
        left = count
        while left > 0:
            got = incoming.recv(min(left, CHUNK))
            if not got:
                raise ConnectionError("the host before this one has left")
            left -= len(got)
        sender.join()
        say(event="done", seconds=time.monotonic() - begin)


if __name__ == "__main__":
    main()
