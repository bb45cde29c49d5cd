from polybus.dialects.gsb.gsb_packets import GsbEncoding

class YaEncoding(GsbEncoding):
    def __init__(self, number: int) -> None: ...
