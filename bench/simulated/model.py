"""A model directory of a few kilobytes: a GPT-2 configuration and a tokenizer, no weights.

Each listed word is one token, with or without a space before it; any other text falls apart
into pairs of letters and bytes, so different texts never get the same tokens.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTEXT_TOKENS = 131_072

_LISTED = """
a about above across add after again age air all almost along also always am among an and animal
another answer any are around as ask at away back bad base be bear because become been before
began begin being below best better between big bird black blue boat body book both box boy
bring brown build busy but by call came can car care carry cause center certain change check city
class clear close cold color come common complete contain copy could country course cover cross
cry cut dark day decide deep did differ direct do does dog done door down draw drive dry during
each early earth ease east eat end enough even ever every example eye face fact fall family far
farm fast father feel feet few field figure fill final find fine fire first fish five fly follow
food foot for force form found four free friend from front full game gave get girl give go gold
good got govern great green ground group grow had half hand happen hard has have he head hear
heat help her here high him his hold home horse hot hour house how hundred idea if in inch
interest is island it just keep kind king knew know land language large last late laugh lay lead
learn leave left less let letter life light like line list listen little live long look lot love
low machine made main make man many map mark may me mean measure men might mile mind minute miss
money moon more morning most mother mountain move much music must my name near need never new
next night no north note nothing notice noun now number numeral object of off often oh old on
once one only open or order other our out over own page paper part pass pattern people perhaps
person picture piece place plain plan plane plant play point port pose possible pound power press
problem produce product pull put question quick rain ran reach read ready real record red
remember rest right river road rock room round rule run said same saw say school science sea
second see seem self sentence serve set several shape she ship short should show side simple
since sing sit six size sleep slow small snow so some song soon sound south special spell stand
star start state stay step still stood stop story street strong study such sun sure surface
table tail take talk teach tell ten test than that the their them then there these they thing
think this those though thought thousand three through time to together told too took top toward
town travel tree true try turn two under unit until up us use usual very voice vowel wait walk
want war warm was watch water way we week weight well went were west what wheel when where which
while white who whole why will wind with wonder wood word work world would write year yet you
young your request session token cache server router rank model prompt user system assistant
"""
WORDS = _LISTED.split()

_SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPACE = "Ġ"  # how the byte-level alphabet writes a space
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
_PAIRS = [first + second for first in [_SPACE, *_LETTERS] for second in _LETTERS]

_FIRST_WORD = len(_SPECIAL) + len(_BYTES)
OUTPUT_IDS = range(_FIRST_WORD, _FIRST_WORD + len(WORDS))
"""The ids of the words with a space before them: decoded and encoded again, they stay the same."""


def _vocabulary() -> dict[str, float]:
    """Piece to log probability; a whole word beats any way to cut it up."""
    scores = dict.fromkeys(_SPECIAL, 0.0) | dict.fromkeys(_BYTES, -10.0)
    scores |= dict.fromkeys((_SPACE + word for word in WORDS), -8.0)
    for piece, score in [(word, -8.5) for word in WORDS] + [(pair, -12.0) for pair in _PAIRS]:
        scores.setdefault(piece, score)
    return scores


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram(list(_vocabulary().items()), unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
    return tokenizer


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", _config(tokenizer.get_vocab_size()))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SPECIAL[0],
            "pad_token": _SPECIAL[0],
            "model_max_length": CONTEXT_TOKENS,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _config(vocabulary_size: int) -> dict[str, object]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "torch_dtype": "float32",
        "vocab_size": vocabulary_size,
        "n_positions": CONTEXT_TOKENS,
        "n_ctx": CONTEXT_TOKENS,
        "n_embd": 64,
        "n_layer": 1,
        # Eight, so that it divides among eight ranks.
        "n_head": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
