"""The one program of ours that opens /dev/kfd: ``python3 -I -S kfd_child.py (probe | GPU_ID…)``.

A program and not a part of the daemon, since an open /dev/kfd makes a KFD process for as long as that process lives,
whatever it closes, and while there is one no tool can cut a GPU anew. It imports next to nothing, so it is there and
gone in some milliseconds, and speaks in lines:

    probe       opens and ends: ``open ok``, or ``open <errno's name>``
    GPU_ID…     listens to these GPUs' events until its standard input ends: ``listening <gpu_id>`` or
                ``refused <gpu_id> <errno's name>`` each, then ``event <gpu_id> <line>``

It ends when its standard input does, which is when the daemon does, by whatever signal. Refused: PR_SET_PDEATHSIG,
which is sent when the *thread* ends that started the child, and needs ctypes or a fork of our own.

Sources: include/uapi/linux/kfd_ioctl.h (AMDKFD_IOC_SMI_EVENTS, KFD_SMI_EVENT_*), ``kfd_smi_events.c``.
"""

import errno
import fcntl
import os
import select
import struct
import sys

KFD = "/dev/kfd"
SMI_EVENTS = 3 << 30 | 8 << 16 | ord("K") << 8 | 0x1F
WANTED = (1, 2, 3, 4)
"""Page fault, throttling, before a reset, after it. Later ones tell of single processes, thousands in a second."""


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def listen(kfd: int, gpu_id: int) -> int:
    asked = bytearray(struct.pack("=II", gpu_id, 0))
    fcntl.ioctl(kfd, SMI_EVENTS, asked)
    stream: int = struct.unpack("=II", asked)[1]
    os.set_blocking(stream, False)
    os.write(stream, struct.pack("=Q", sum(1 << event - 1 for event in WANTED)))
    return stream


def main(words: list[str]) -> None:
    try:
        kfd = os.open(KFD, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        say("open", name(error))
        return
    say("open", "ok")
    if words == ["probe"]:
        return
    poll = select.poll()
    poll.register(0, select.POLLIN)
    streams: dict[int, int] = {}
    for gpu_id in map(int, words):
        try:
            streams[listen(kfd, gpu_id)] = gpu_id
        except OSError as error:
            say("refused", gpu_id, name(error))
        else:
            say("listening", gpu_id)
    rest = dict.fromkeys(streams, b"")
    for stream in streams:
        poll.register(stream, select.POLLIN)
    while True:
        for fd, events in poll.poll():
            if fd == 0:
                return  # nobody ever writes there: this is its end
            try:
                read = os.read(fd, 4096)
            except BlockingIOError:
                continue
            except OSError as error:
                read = b""
                say("refused", streams[fd], name(error))
            *lines, rest[fd] = (rest[fd] + read).split(b"\n")
            for line in lines:
                say("event", streams[fd], line.decode("ascii", "replace"))
            if not read or events & (select.POLLERR | select.POLLNVAL) or len(rest[fd]) > 4096:
                poll.unregister(fd)


if __name__ == "__main__":
    main(sys.argv[1:])
