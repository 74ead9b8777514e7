"""Commands that let a trained model speak: serve, chat, generate, push."""
