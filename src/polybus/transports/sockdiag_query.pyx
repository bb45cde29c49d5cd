"""One query to the kernel's socket table over netlink, without the GIL.

`transports/socket_table.py` explains the query and how to read its result. The native port
makes one per call, on many threads; in Python most of the time went into waiting for the
GIL around two system calls of some microseconds.
"""

from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy, memset

cdef extern from "<sys/socket.h>" nogil:
    ctypedef unsigned int socklen_t
    cdef struct sockaddr:
        pass
    ssize_t send(int, const void*, size_t, int)
    ssize_t recvfrom(int, void*, size_t, int, sockaddr*, socklen_t*)
    int AF_INET, AF_INET6, MSG_DONTWAIT

cdef extern from "<arpa/inet.h>" nogil:
    uint16_t htons(uint16_t)

cdef extern from "<linux/netlink.h>" nogil:
    cdef struct nlmsghdr:
        uint32_t nlmsg_len
        uint16_t nlmsg_type
        uint16_t nlmsg_flags
        uint32_t nlmsg_seq
        uint32_t nlmsg_pid
    cdef struct sockaddr_nl:
        uint32_t nl_pid
    int NLM_F_REQUEST

cdef extern from "<netinet/in.h>" nogil:
    int IPPROTO_TCP

cdef extern from "<linux/sock_diag.h>" nogil:
    int SOCK_DIAG_BY_FAMILY

cdef extern from "<linux/inet_diag.h>" nogil:
    cdef struct inet_diag_sockid:
        uint16_t idiag_sport
        uint16_t idiag_dport
        uint32_t idiag_src[4]
        uint32_t idiag_dst[4]
        uint32_t idiag_cookie[2]
    cdef struct inet_diag_req_v2:
        uint8_t sdiag_family
        uint8_t sdiag_protocol
        uint32_t idiag_states
        inet_diag_sockid id
    cdef struct inet_diag_msg:
        uint8_t idiag_state
        uint32_t idiag_uid
        uint32_t idiag_inode

cdef enum:
    MAX_ANSWER_BYTES = 4096
    MAX_STRAY_ANSWERS = 8  # responses to abandoned requests

cdef struct Question:
    nlmsghdr header
    inet_diag_req_v2 request


def query_socket(
    int descriptor,
    uint32_t sequence,
    bytes far_ip not None,
    uint16_t far_port,
    bytes near_ip not None,
    uint16_t near_port,
):
    """Return (state, uid, inode) of the socket at `far` connected to `near`, or None.

    Addresses have 4 or 16 bytes, both as many. Raises OSError if the kernel gives no answer.
    """
    cdef Question question
    cdef inet_diag_msg found
    cdef int outcome
    if len(far_ip) != len(near_ip) or len(far_ip) not in (4, 16):
        raise ValueError("addresses of 4 or 16 bytes each")
    memset(&question, 0, sizeof(Question))
    question.header.nlmsg_len = sizeof(Question)
    question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY
    question.header.nlmsg_flags = NLM_F_REQUEST
    question.header.nlmsg_seq = sequence
    question.request.sdiag_family = AF_INET if len(far_ip) == 4 else AF_INET6
    question.request.sdiag_protocol = IPPROTO_TCP
    question.request.idiag_states = 0xFFFFFFFF
    question.request.id.idiag_sport = htons(far_port)
    question.request.id.idiag_dport = htons(near_port)
    memcpy(question.request.id.idiag_src, <const char*>far_ip, len(far_ip))
    memcpy(question.request.id.idiag_dst, <const char*>near_ip, len(near_ip))
    question.request.id.idiag_cookie[0] = question.request.id.idiag_cookie[1] = 0xFFFFFFFF
    with nogil:
        outcome = ask(descriptor, &question, &found)
    if outcome < 0:
        raise OSError(-outcome, "the socket table does not answer")
    return (found.idiag_state, found.idiag_uid, found.idiag_inode) if outcome else None


cdef int ask(int descriptor, const Question* question, inet_diag_msg* found) noexcept nogil:
    """Return 1 with a response, 0 if there is no such socket, else a negative errno."""
    cdef uint8_t answer[MAX_ANSWER_BYTES]
    cdef const nlmsghdr* header = <const nlmsghdr*>answer
    cdef sockaddr_nl sender
    cdef socklen_t size
    cdef ssize_t got
    if send(descriptor, question, sizeof(Question), 0) != sizeof(Question):
        return -errno
    for _ in range(MAX_STRAY_ANSWERS):
        size = sizeof(sockaddr_nl)
        got = recvfrom(descriptor, answer, sizeof(answer), MSG_DONTWAIT, <sockaddr*>&sender, &size)
        if got < <ssize_t>sizeof(nlmsghdr):
            return -errno if got < 0 else 0
        if sender.nl_pid != 0 or header.nlmsg_seq != question.header.nlmsg_seq:
            continue
        if header.nlmsg_type != SOCK_DIAG_BY_FAMILY:
            return 0
        if got < <ssize_t>(sizeof(nlmsghdr) + sizeof(inet_diag_msg)):
            return 0
        memcpy(found, answer + sizeof(nlmsghdr), sizeof(inet_diag_msg))
        return 1
    return 0
