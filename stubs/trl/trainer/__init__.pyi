from . import grpo_trainer as grpo_trainer
from . import utils as utils
