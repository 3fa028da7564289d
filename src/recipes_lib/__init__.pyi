from recipes_lib.api import check as check
from recipes_lib.api import load_run as load_run
from recipes_lib.api import train as train

__version__: str
