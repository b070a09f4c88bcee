"""The program as data: structs, symbols, inference, and the text that people read. No op is known by name here."""
