"""vmmkv: a KV cache that is one contiguous tensor, backed by memory only where tokens are."""

from .cache import KVCache as KVCache
from .errors import *  # noqa: F403
from .layout import KVLayout as KVLayout
from .layout import LayerLayout as LayerLayout
from .pool import FramePool as FramePool
from .prefix.retention import Retention as Retention
from .prefix.retention import RetentionConfig as RetentionConfig
from .publication import publish as publish
from .publication import unpublish as unpublish
from .sequence import Sequence as Sequence
from .stats import FREE_PAGE as FREE_PAGE
from .stats import KEPT_PAGE as KEPT_PAGE
from .stats import LOOKAHEAD_PAGE as LOOKAHEAD_PAGE
from .stats import OTHERS_PAGE as OTHERS_PAGE
from .stats import SHARED_PAGE as SHARED_PAGE
from .stats import SURPLUS_PAGE as SURPLUS_PAGE
from .stats import VACANT_PAGE as VACANT_PAGE
from .stats import CacheStats as CacheStats
from .stats import CallStats as CallStats
from .stats import FramePoolStats as FramePoolStats
from .tensors import ScaledKV as ScaledKV

__version__ = "0.1.0"
