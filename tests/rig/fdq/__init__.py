"""Does FDQ keep its word? Clients write down what they do, and a checker judges it.

diary.py       a file per process: what it began, and how that ended
history.py     the diaries of a round, as values
found.py       what is in the bus when all is quiet
checker.py     compares the two: anomalies, in the style of Jepsen's queues
recording.py   a bus for a client that writes down what goes through it
children.py    the producers and consumers of a round, processes that may be killed
plans.py       what the handler of a message is to do with it
workload.py    a round: a bus, its clients, what is done to them, and the verdict
"""
