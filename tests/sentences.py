"""A sentence, a tokenizer trained on it that knows every byte, and a processor that has this tokenizer."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

SENTENCE = "the quick brown fox jumps over the lazy dog and sleeps until noon. "
VOCABULARY = 280


def trained_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def image_and_text_processor() -> LlavaProcessor:
    return LlavaProcessor(CLIPImageProcessor(), trained_tokenizer())
