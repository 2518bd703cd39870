/* amdvgpu-hook: tells the daemon which container has got a slice. Named as createRuntime and poststop hook by the CDI
 * file, so a container runtime runs it once for each slice and step, with the container's state (OCI runtime
 * specification, "state") on standard input.
 *
 *     amdvgpu-hook start|stop SLICE [--socket PATH] [--wait MILLISECONDS] [--judged] [--require]
 *
 * It is a messenger. It sends one message over the daemon's report socket, with two descriptors at a start: a pidfd of
 * the container's first process, and the root that this process sees (both opened by our rights: a rootless runtime's
 * hook may, where a confined daemon may not). It gets one line: "ok", or "refuse" and why. What is believed, and what
 * follows from it, is the daemon's business (amdvgpud/serve/reports.py).
 *
 * A container that starts belongs to somebody who did nothing wrong: whatever fails here, the start goes on, unless the
 * daemon says no. Two options turn that around. --require: only the daemon's "ok" starts a container. --judged, where
 * images.policy may refuse: so it is as soon as a daemon listens at the socket. Then a limit is at stake, and every
 * other way out would be a way around it that a guest or a busy machine can open: a state too long to be read, a
 * message not taken, an answer that is late. A daemon that is away is no such way, as no guest can send it away; it
 * must not keep a machine's containers from starting after an upgrade that went wrong (--require is for who sees that
 * otherwise). One that hangs up has been reached: a start in the moment of its end fails, and may be tried again.
 * A hook of step "stop" cannot fail. No wait is without a bound.
 *
 * Static where that can be: it runs on the host, also where it came in an image of another distribution. That is a file of
 * 700 KiB in place of 15, of which a start touches a few pages.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
	STATE_ROOM = 1 << 20, /* a pod's annotations are part of the state, and may come to 256 KiB */
	MESSAGE_ROOM = 8192,
	REPLY_ROOM = 1024,
	WAIT_MS = 100,
};

static const char *const usage =
	"usage: amdvgpu-hook start|stop SLICE [--socket PATH] [--wait MILLISECONDS] [--judged] [--require]\n";

static char state[STATE_ROOM];
static int required;
static int judged;
static int reached; /* a daemon listens, whether or not it answers */
static long long deadline_ms;

static long long now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

/* The end where the daemon has not said ok: an exit code that the runtime takes for a failed start only if one of the two
 * options makes it so. */
static _Noreturn void untold(const char *format, ...)
{
	va_list rest;
	if (!required && !(judged && reached))
		_exit(0);
	va_start(rest, format);
	fputs("amdvgpu-hook: ", stderr);
	vfprintf(stderr, format, rest);
	fprintf(stderr, "; the configuration (%s) lets no container have a slice without the daemon's word\n",
		required ? "hook.required" : "images.policy");
	_exit(1);
}

/* Whether fd can be read or written before the deadline. */
static int ready(int fd, short events)
{
	struct pollfd one = { fd, events, 0 };
	for (;;) {
		long long left = deadline_ms - now_ms();
		int n = poll(&one, 1, left > 0 ? (int)left : 0);
		if (n >= 0)
			return n;
		if (errno != EINTR)
			return 0;
	}
}

static size_t read_state(void)
{
	size_t n = 0;
	while (n < sizeof state) {
		if (!ready(0, POLLIN))
			untold("the runtime did not write the container's state in time");
		ssize_t got = read(0, state + n, sizeof state - n);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return n;
		n += (size_t)got;
	}
	untold("the container's state is longer than %d bytes", STATE_ROOM);
}

/* ------------------------------------------------------------------------------------- the state, as far as needed
 * Values are found, not understood: they are passed on as they stand, and the daemon's own parser reads them.
 * Each function takes a position and gives the one after what it skipped, or end where the text breaks off.
 */

static const char *skip_blanks(const char *p, const char *end)
{
	while (p < end && strchr(" \t\r\n", *p) && *p)
		p++;
	return p;
}

static const char *skip_string(const char *p, const char *end)
{
	for (p++; p < end; p++) {
		if (*p == '\\')
			p++;
		else if (*p == '"')
			return p + 1;
	}
	return end;
}

static const char *skip_value(const char *p, const char *end)
{
	int depth = 0;
	while (p < end) {
		if (*p == '"') {
			p = skip_string(p, end);
		} else if (*p == '{' || *p == '[') {
			depth++;
			p++;
		} else if (*p == '}' || *p == ']') {
			if (depth == 0)
				return p;
			depth--;
			p++;
		} else if (depth == 0 && (*p == ',' || *p == '\n' || *p == ' ')) {
			return p;
		} else {
			p++;
			continue;
		}
		if (depth == 0)
			return p;
	}
	return end;
}

struct span {
	const char *key; /* as it is looked for, with its quotes */
	const char *at;
	int length;
};

/* The values of the object's own keys, as they stand in the text. The first of two alike counts. */
static void find(const char *p, const char *end, struct span *wanted, int count)
{
	p = skip_blanks(p, end);
	if (p == end || *p != '{')
		return;
	p++;
	while ((p = skip_blanks(p, end)) < end && *p == '"') {
		const char *key = p;
		p = skip_string(p, end);
		size_t length = (size_t)(p - key);
		p = skip_blanks(p, end);
		if (p == end || *p != ':')
			return;
		p = skip_blanks(p + 1, end);
		const char *value = p;
		p = skip_value(p, end);
		for (int i = 0; i < count; i++)
			if (!wanted[i].at && strlen(wanted[i].key) == length && !memcmp(wanted[i].key, key, length)) {
				wanted[i].at = value;
				wanted[i].length = (int)(p - value);
			}
		p = skip_blanks(p, end);
		if (p == end || *p != ',')
			return;
		p++;
	}
}

/* ------------------------------------------------------------------------------------------------------ the message */

static int connected(const char *path)
{
	struct sockaddr_un there = { .sun_family = AF_UNIX };
	if (strlen(path) >= sizeof there.sun_path)
		untold("%s is too long for the name of a socket", path);
	strcpy(there.sun_path, path);
	/* Of messages, not a stream: each side gets all or nothing, and waits for no end. */
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		untold("no socket: %s", strerror(errno));
	/* EAGAIN: somebody listens, and the queue is full. There is no event to wait for then. */
	while (connect(fd, (struct sockaddr *)&there, sizeof there)) {
		reached = errno == EAGAIN;
		if (!reached || now_ms() >= deadline_ms)
			untold("no daemon answers at %s: %s", path, strerror(errno));
		nanosleep(&(struct timespec){ 0, 2000000 }, NULL);
	}
	reached = 1;
	return fd;
}

/* Up to two descriptors of the process: whether they are there, the message says ("fds"). */
static int open_process(long pid, int fds[2], char *names)
{
	char path[32];
	int n = 0;
#ifdef SYS_pidfd_open
	if ((fds[n] = (int)syscall(SYS_pidfd_open, (int)pid, 0)) >= 0) {
		*names++ = 'p';
		n++;
	}
#endif
	snprintf(path, sizeof path, "/proc/%ld/root", pid);
	if ((fds[n] = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC)) >= 0) {
		*names++ = 'r';
		n++;
	}
	*names = 0;
	return n;
}

static void tell(int fd, char *text, size_t length, const int *fds, int count)
{
	union {
		char room[CMSG_SPACE(2 * sizeof(int))];
		struct cmsghdr aligned;
	} control = { { 0 } };
	struct iovec part = { text, length };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	if (count) {
		message.msg_control = control.room;
		message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
		struct cmsghdr *head = CMSG_FIRSTHDR(&message);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
		memcpy(CMSG_DATA(head), fds, (size_t)count * sizeof(int));
	}
	if (sendmsg(fd, &message, MSG_NOSIGNAL) < 0)
		untold("the daemon cannot be told: %s", strerror(errno));
}

static int usable_name(const char *name)
{
	size_t n = strlen(name);
	return n && n <= 63 && strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789.-") == n;
}

int main(int argc, char **argv)
{
	const char *path = "/run/amdvgpud/report.sock";
	long wait_ms = WAIT_MS;
	if (argc < 3 || (strcmp(argv[1], "start") && strcmp(argv[1], "stop")) || !usable_name(argv[2])) {
		fputs(usage, stderr);
		return 2;
	}
	int start = !strcmp(argv[1], "start");
	for (int i = 3; i < argc; i++) {
		if (!strcmp(argv[i], "--require"))
			required = start;
		else if (!strcmp(argv[i], "--judged"))
			judged = start;
		else if (!strcmp(argv[i], "--socket") && i + 1 < argc)
			path = argv[++i];
		else if (!strcmp(argv[i], "--wait") && i + 1 < argc && atol(argv[i + 1]) > 0)
			wait_ms = atol(argv[++i]);
		else // of a CDI file that a newer daemon has left: no reason to keep a container from starting
			fprintf(stderr, "amdvgpu-hook: this version has no option '%s', and goes on without it\n", argv[i]);
	}
	deadline_ms = now_ms() + wait_ms;

	/* Before the state, whose faults weigh differently with and without a daemon (see --judged). */
	int fd = connected(path);
	size_t size = read_state();
	struct span found[] = { { "\"id\"", 0, 0 }, { "\"pid\"", 0, 0 }, { "\"bundle\"", 0, 0 }, { "\"status\"", 0, 0 } };
	find(state, state + size, found, 4);
	if (!found[0].at || *found[0].at != '"')
		untold("the container's state has no id");
	long pid = found[1].at ? strtol(found[1].at, NULL, 10) : 0;

	int fds[2] = { -1, -1 };
	char names[3] = "";
	int count = start && pid > 0 ? open_process(pid, fds, names) : 0;
	char message[MESSAGE_ROOM];
	int length = snprintf(message, sizeof message,
			      "{\"version\":1,\"step\":\"%s\",\"slice\":\"%s\",\"fds\":\"%s\",\"pid\":%ld,\"id\":%.*s,"
			      "\"bundle\":%.*s,\"status\":%.*s}",
			      argv[1], argv[2], names, pid, found[0].length, found[0].at,
			      found[2].at ? found[2].length : 2, found[2].at ? found[2].at : "\"\"",
			      found[3].at ? found[3].length : 2, found[3].at ? found[3].at : "\"\"");
	if (length < 0 || length >= (int)sizeof message)
		untold("the container's id or bundle is too long for a message of %d bytes", MESSAGE_ROOM);

	tell(fd, message, (size_t)length, fds, count);
	char reply[REPLY_ROOM];
	if (!ready(fd, POLLIN))
		untold("the daemon did not answer within %ld ms", wait_ms);
	ssize_t got = recv(fd, reply, sizeof reply - 1, 0);
	if (got <= 0)
		untold("the daemon hung up");
	reply[got] = 0;
	if (start && !strncmp(reply, "refuse ", 7)) {
		fprintf(stderr, "amdvgpu-hook: %s\n", reply + 7);
		return 1;
	}
	if (strcmp(reply, "ok"))
		untold("the daemon did not take the report: %s", reply);
	return 0;
}
