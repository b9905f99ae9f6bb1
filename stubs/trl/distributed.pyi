class DistributedBackend:
    zero_stage: int
    fsdp_version: int | None
    @property
    def is_zero3(self) -> bool: ...
    @property
    def is_fsdp(self) -> bool: ...
