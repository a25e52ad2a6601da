"""A receiver that takes requests and answers late or never: `python -m bench.silent PORT SECONDS` (0: never)."""

import asyncio
import sys


async def main(port: int, seconds: float) -> None:
    """Serves until it is stopped. `GET /` says how many requests it holds."""
    held = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get "):
                    body = str(held).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                    continue
                length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                held += 1
                try:
                    # Until the sender gives up, where there is no answer.
                    await (asyncio.sleep(seconds) if seconds else reader.read(1))
                finally:
                    held -= 1
                if not seconds:
                    return
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    from webhookhub.limits import raise_descriptor_limit

    raise_descriptor_limit()
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
